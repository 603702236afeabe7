"""The log of events, and outages in it."""

import json
import logging

import pytest
from tests.logs import events_in

from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.cli.logs import logged
from oncely.cli.options import RunOptions
from oncely.core.errors import StoreUnavailable

_log = EventLog("oncely.test")


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oncely.test")


def outage() -> Outage:
    return Outage(
        _log, "lost", "%(what)s is lost: %(reason)s", "back", "%(what)s is back", what="it"
    )


def test_a_sentence_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Texts from outside are escaped in it, and passwords masked; the fields are as they were."""
    extra = {"event": "seen", "message_id": "a\n\x1b[2J", "url": "amqp://u:geheim@h"}
    _log.warning("'%(message_id)s' at %(url)s", extra=extra)
    [record] = caplog.records
    assert record.getMessage() == "'a\\n\\x1b[2J' at amqp://u:***@h"
    assert vars(record).items() >= extra.items()


def test_a_name_is_not_masked(caplog: pytest.LogCaptureFixture) -> None:
    """A message would not be found by another."""
    _log.info("'%(message_id)s'", extra={"event": "seen", "message_id": "password:reset:42"})
    assert caplog.records[0].getMessage() == "'password:reset:42'"
    lines: list[str] = []
    with logged(RunOptions(log_level="info", log_format="json"), lines.append):
        _log.info("'%(message_id)s'", extra={"event": "seen", "message_id": "password:reset:42"})
    assert json.loads(lines[0])["message_id"] == "password:reset:42"


def test_a_traceback_is_escaped() -> None:
    """It has texts from outside in it."""
    lines: list[str] = []
    with logged(RunOptions(), lines.append):
        _log.warning("failed", exc_info=ValueError("\x1b[2J"), extra={"event": "failed"})
    assert lines[0].endswith("\n  ValueError: \\x1b[2J")


def test_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """It is the text of an error, which has its type where it is not oncely's own."""
    try:
        raise ValueError("amqp://u:geheim@h\nand more")
    except ValueError as error:
        _log.exception("failed: %(reason)s", extra={"event": "failed"})
        _log.warning("failed: %(reason)s", exc_info=error, extra={"event": "failed"})
    _log.warning("failed: %(reason)s", error=StoreUnavailable("gone"), extra={"event": "failed"})
    masked = "failed: ValueError: amqp://u:***@h\\nand more"
    assert [each.getMessage() for each in caplog.records] == [masked, masked, "failed: gone"]
    assert [bool(each.exc_info) for each in caplog.records] == [True, True, False]


def test_the_place_is_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    """A record tells where it was logged, and not where the logger is."""
    _log.info("seen", extra={"event": "seen"})
    outage().met("gone")
    assert {each.filename for each in caplog.records} == {"test_event_log.py"}


def test_an_outage_is_told_twice(caplog: pytest.LogCaptureFixture) -> None:
    """Once when it begins and once when it is over, however often it is met; and so the next."""
    away = outage()
    away.over()
    for _ in range(2):
        for number in range(3):
            away.met(StoreUnavailable(f"gone {number}"))
        away.over()
        away.over()
    assert [each.getMessage() for each in caplog.records] == [
        "it is lost: gone 0",
        "it is back",
    ] * 2
    assert vars(caplog.records[0])["error"] == "StoreUnavailable: gone 0"
    assert vars(caplog.records[1])["away_s"] >= 0


def test_an_outage_met_by_several(caplog: pytest.LogCaptureFixture) -> None:
    """It is over when it is over for everyone who has met it: reads may go on while writes fail."""
    away = outage()
    away.met("full", "writes")
    away.over("reads")
    away.met("full", "reads")
    away.over("reads")
    assert (events_in(caplog), away.goes_on) == (["lost"], True)
    away.over("writes")
    assert (events_in(caplog), away.goes_on) == (["lost", "back"], False)


def test_the_traceback_of_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """An error that is not one of a server that is away has its traceback."""
    for error in (StoreUnavailable("gone"), ValueError("a bug"), "a text"):
        away = outage()
        away.met(error)
    assert [bool(each.exc_info) for each in caplog.records] == [False, True, False]
