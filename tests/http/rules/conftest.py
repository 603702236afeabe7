"""Fixtures for tests of idempotency keys over HTTP."""

from typing import Any

import pytest
from tests.http.rules.drivers import DRIVES, Asked, Drive, Site

from oncely.http import HttpAnswer
from oncely.ledger import Ledger


class Shop:
    """A handler that counts its calls, and answers as a test sets it: `answers` one after the
    other, the last again and again.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.answers: list[HttpAnswer] = []

    @property
    def calls(self) -> int:
        """How often it was called."""
        return len(self.asked)

    def __call__(self, asked: Asked) -> HttpAnswer:
        self.asked.append(asked)
        if len(self.answers) > 1:
            return self.answers.pop(0)
        if self.answers:
            return self.answers[0]
        # Another one each time: what is replayed is told apart from what ran again.
        body = f'{{"call": {self.calls}}}'.encode()
        return HttpAnswer(201, [("Content-Type", "application/json")], body)


@pytest.fixture
def shop() -> Shop:
    """The handler of a site."""
    return Shop()


@pytest.fixture(params=sorted(DRIVES))
def drive(request: pytest.FixtureRequest, ledger: Ledger, shop: Shop) -> Drive:
    """Makes a site of `shop`, or of another handler, behind each middleware in turn."""

    def site(handler: Any = shop, **options: Any) -> Site:
        return DRIVES[request.param](handler, ledger, **{"consumer": "api", **options})

    return site
