"""The retention of a consumer's records, stored in the ledger."""

from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.durations import Duration
from oncely.core.errors import StoreError
from oncely.ledger.ledger import Ledger

_log = EventLog(__name__)


class StoredRetention:
    """Stores once how long the records of `consumer` stay."""

    def __init__(self, ledger: Ledger, consumer: str, retention: Duration) -> None:
        self.is_stored = False
        self._ledger = ledger
        self._consumer = consumer
        self._retention = retention
        self._outage = Outage(
            _log,
            "retention_not_stored",
            "the retention of '%(consumer)s' could not be stored: %(reason)s; the next message "
            "stores it",
            "retention_stored",
            "the retention of '%(consumer)s' is stored after %(away_s)s s",
            consumer=consumer,
        )

    def store(self) -> None:
        """Store it, unless it is stored; where the store fails, the next call tries again."""
        if self.is_stored:
            return
        try:
            self._ledger.keep_retention(self._consumer, self._retention)
        except StoreError as error:
            self._outage.met(error)
        else:
            self.is_stored = True
            self._outage.over()
