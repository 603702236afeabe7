"""A line from a ledger to its server that a test can cut, and one beside it that stays."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from sqlalchemy import make_url
from tests.proxy import Proxy
from tests.records import record_of

from oncely.core.record import Key, Record
from oncely.ledger.ledger import Ledger, open_ledger

REFUSES = 20
"""How many connections a server refuses while it is away: more than a call tries, and those threads
try that look after the ledger.
"""
MESSAGE_ID = "the-message"
KEY = Key("billing", MESSAGE_ID)


@dataclass
class Line:
    """A ledger on a server behind a proxy, and one with a line of its own."""

    ledger: Ledger
    proxy: Proxy
    other: Ledger

    def stored(self, key: Key = KEY) -> Record:
        """The record as it is stored."""
        return record_of(self.other, key)


@contextmanager
def line_to(url: str) -> Iterator[Line]:
    """A line to the ledger without a row at `url`, which has to be cut once in the end."""
    at = make_url(url)
    with Proxy(at.port or 0) as proxy:
        through = at.set(host="127.0.0.1", port=proxy.port)
        urls = (url.render_as_string(hide_password=False) for url in (through, at))
        ledger, other = (open_ledger(url) for url in urls)
        with closing(ledger), closing(other):
            # So that it is no first request that is cut, but one in the middle.
            ledger.counts()
            yield Line(ledger, proxy, other)
            assert proxy.cuts == 1
