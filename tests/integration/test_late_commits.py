"""A line is lost while its statement waits: what the server does with it later is not another's."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from sqlalchemy import make_url
from tests.integration.others import Other
from tests.proxy import Proxy
from tests.records import granted

from oncely.core.record import Key
from oncely.ledger.ledger import open_ledger


class SeveringProxy(Proxy):
    """A proxy that can cut every line at once, whatever is on its way."""

    def _serve(self, client: socket.socket) -> None:
        self.clients = [*getattr(self, "clients", []), client]
        super()._serve(client)

    def sever(self) -> None:
        for client in self.clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self.clients = []


def test_line_lost_while_waiting(other: Other, request: pytest.FixtureRequest) -> None:
    """A claim whose first statement goes through only after its second was sent is granted."""
    at = make_url(request.getfixturevalue(f"{other.kind}_url"))
    with SeveringProxy(at.port or 0) as proxy, ThreadPoolExecutor(1) as pool:
        through = at.set(host="127.0.0.1", port=proxy.port)
        with closing(open_ledger(through.render_as_string(hide_password=False))) as ledger:
            ledger.migrate()
            other.run("BEGIN")
            other.run(
                "INSERT INTO processed_messages"
                " (message_id, provider, status, first_processed_at, last_processed_at)"
                " VALUES ('a', 'billing', 'processing', now(), now())"
            )
            outcome = pool.submit(ledger.claim, Key("billing", "a"), "60s")
            other.await_waiters(1)
            proxy.sever()
            other.await_waiters(2)
            other.run("ROLLBACK")
            claim = granted(outcome.result(60))
            assert claim.attempts == 1
            ledger.complete(claim)
