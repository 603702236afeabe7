"""Listening for notifications, where the process can start no thread."""

import threading

import psycopg
import pytest

from oncely.stores.sql.postgresql_listener import PostgresqlListener


def test_no_thread_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for messages looks for them instead, and closing waits for nobody."""

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def connect() -> "psycopg.Connection[tuple[object, ...]]":
        raise AssertionError

    listening = PostgresqlListener(connect, "messages", lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        listening.begin()
    assert not listening.is_listening
    listening.close()
