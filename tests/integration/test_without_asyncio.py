"""Async faces where asyncio does not run them, as under trio: each says under what it runs."""

import hmac
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.http import IdempotencyKey, github, webhook
from oncely.ledger.async_ledger import AsyncLedger
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.lifecycle.work import claimed
from oncely.middleware.threads import Threads
from oncely.once import once

KEY = Key("billing", "1")
BODY = b'{"zen": "x"}'
SIGNATURE = b"sha256=" + hmac.digest(b"secret", BODY, "sha256").hex().encode()

Call = Callable[[Ledger], Any]


@pytest.fixture
def ledger(sqlite_ledger_url: str) -> Iterator[Ledger]:
    """An empty ledger in a file."""
    with closing(open_ledger(sqlite_ledger_url)) as opened:
        yield opened


async def _fail(*_: object) -> None:
    raise AssertionError("nothing is to run")


def _request(app: Any, *fields: tuple[bytes, bytes]) -> Any:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": BODY, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b""}
    return app({**scope, "headers": [*fields]}, receive, _fail)


def _with_transaction(ledger: Ledger) -> Any:
    database: Any = ledger.database_id
    engine = create_async_engine(database[0].set(drivername="sqlite+aiosqlite"))
    return once(ledger, consumer="billing", key=lambda id_, *_: id_, transaction=engine)(_fail)("1")


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: once(ledger, consumer="billing", key=lambda id_: id_)(_fail)("1"),
        _with_transaction,
        lambda ledger: claimed(ledger, KEY).__aenter__(),
        lambda ledger: AsyncLedger(ledger).claim(KEY),
        lambda ledger: AsyncLedger(ledger).claim_many([KEY]),
        lambda ledger: AsyncLedger(ledger).now(),
        lambda ledger: AsyncLedger(ledger).scan().__anext__(),
        lambda ledger: AsyncLedger(ledger).read().__anext__(),
        lambda ledger: _request(
            IdempotencyKey(_fail, ledger, consumer="api"), (b"idempotency-key", b'"a"')
        ),
        lambda ledger: _request(
            webhook(ledger, queue="in", verify=github("secret")),
            (b"x-hub-signature-256", SIGNATURE),
            (b"x-github-delivery", b"1"),
        ),
        lambda _: Threads().run(_fail, Message("1")),
    ],
)
def test_each_face(ledger: Ledger, call: Call) -> None:
    """It raises one clear line before anything runs or is stored."""
    coroutine: Coroutine[Any, Any, Any] = call(ledger)
    with pytest.raises(ConfigError, match="under trio call one that is not async: await trio"):
        coroutine.send(None)
    assert [*ledger.scan()] == []
