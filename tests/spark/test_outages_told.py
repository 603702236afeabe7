"""An outage is logged when it begins and when it ends, on Spark as well."""

import logging

import pytest
from tests.logs import events_in

from oncely.core.errors import StoreUnavailable
from oncely.ledger import Ledger
from oncely.spark.modes.steady import patiently
from oncely.spark.recorded_run import RecordedRun
from oncely.spark.sink.channel import TaskChannel


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "oncely")
    monkeypatch.setattr(TaskChannel, "wait", lambda *_: None)


class Failing:
    """Does nothing, after it has failed three times."""

    def __init__(self) -> None:
        self.left = 3

    def __call__(self, *_: object) -> int:
        self.left -= 1
        if self.left >= 0:
            raise StoreUnavailable("gone")
        return 7


def test_a_run(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each batch stores where the run stands."""
    run = RecordedRun(ledger, "daily", "billing")
    monkeypatch.setattr(type(ledger.operations), "keep_run", Failing())
    for _ in range(5):
        with run.ending():
            pass
    assert events_in(caplog) == ["run_not_kept", "run_kept"]


def test_who_waits_steadily(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a task asks is asked again. Spark's workers show warnings alone: the end is one."""
    caplog.set_level(logging.WARNING, "oncely")
    assert patiently(Failing(), "billing") == 7
    assert events_in(caplog) == ["store_unavailable", "store_available"]
