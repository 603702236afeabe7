"""What oncely has logged, by the constant names of its events."""

import logging
from collections.abc import Sequence

import pytest


def events_in(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    """The events that were logged, one after another."""
    return [vars(record)["event"] for record in caplog.records if "event" in vars(record)]


def of_event(caplog: pytest.LogCaptureFixture, *events: str) -> Sequence[logging.LogRecord]:
    """The records of these events."""
    return [record for record in caplog.records if vars(record).get("event") in events]
