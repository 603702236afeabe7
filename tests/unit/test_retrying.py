"""Patience with a server: what is tried again, how often, and how long."""

import time
from collections.abc import Callable

import pytest

from oncely.core.errors import StoreError, StoreUnavailable
from oncely.stores.retrying import TryAgain, patiently


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait would have been."""
    delays: list[float] = []
    monkeypatch.setattr(time, "sleep", delays.append)
    return delays


def _failing(*errors: Exception) -> Callable[[], int]:
    """A call that raises these, one each time, and then says how often it was called."""
    left = list(errors)

    def call() -> int:
        if left:
            raise left.pop(0)
        return len(errors) + 1

    return call


def test_try_again(delays: list[float]) -> None:
    """What raises TryAgain is called again, after ever longer delays."""
    assert patiently(_failing(TryAgain(), TryAgain(), TryAgain())) == 4
    for n, delay in enumerate(delays):
        assert 0.025 * 2**n <= delay <= 0.05 * 2**n


def test_no_try_is_left(delays: list[float]) -> None:
    """The last TryAgain becomes StoreUnavailable, with its text and its cause."""

    def call() -> None:
        try:
            raise OSError("refused")
        except OSError as error:
            raise TryAgain("host: refused") from error

    with pytest.raises(StoreUnavailable, match=r"^host: refused$") as raised:
        patiently(call)
    assert isinstance(raised.value.__cause__, OSError)
    assert len(delays) == 5
    assert sum(delays) <= 1.6


def test_other_errors(delays: list[float]) -> None:
    """Any other error ends it at once."""
    with pytest.raises(StoreError, match="no such table"):
        patiently(_failing(StoreError("no such table")))
    assert delays == []
