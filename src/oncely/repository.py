"""ProcessedMessageRepository: the records of processed messages, used like one table.

A record is looked up, begun, and marked; there are no leases and no second attempts.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from oncely._util.event_log import EventLog
from oncely.core.commands import Granted
from oncely.core.errors import ConfigError, FencedError, RefusedError, StoreError
from oncely.core.ids import Id
from oncely.core.policy import at_most_once
from oncely.core.record import Key, claim_of
from oncely.ledger.inbox import Inbox
from oncely.ledger.ledger import Ledger, checked_ledger

_log = EventLog(__name__)

_POLICY = at_most_once(lease="none")


class ProcessedMessageRepository:
    """Records of messages, by message id and provider (the consumer).

    `ledger` is a Ledger, or an Inbox: then all calls are part of that transaction. A message whose
    record was begun is not begun again, even if it failed, until the record is removed.
    """

    def __init__(self, ledger: Ledger | Inbox) -> None:
        self._calls = ledger if isinstance(ledger, Inbox) else checked_ledger(ledger)

    def is_already_processed(self, message_id: Id, provider: str) -> bool:
        """Whether there is a record of the message, in any state.

        Raises StoreUnavailable where the store cannot be reached.
        """
        return self._calls.find(Key(provider, message_id)) is not None

    def mark_processing(
        self, message_id: Id, provider: str, metadata: Mapping[str, Any] | None = None
    ) -> bool:
        """Begin a record, and return whether this call has; where there is one, the delivery is
        counted among its attempts. Of any number of calls at once, one returns True.
        """
        key = Key(provider, message_id)
        if isinstance(self._calls.claim(key, policy=_POLICY, metadata=metadata), Granted):
            return True
        try:
            attempts = self._calls.count_delivery(key).attempts
        except RefusedError:
            # The record was removed since the claim, and may be begun again.
            return self.mark_processing(message_id, provider, metadata)
        _log.warning(
            "message '%(message_id)s' is a duplicate: attempt %(attempts)s; it does not run again",
            extra={"event": "duplicate", **key._asdict(), "attempts": attempts},
        )
        return False

    def mark_sent(self, message_id: Id, provider: str) -> None:
        """The message is processed.

        Any process may call this and `mark_failed`. Where the message has no record in processing,
        they only log that. An error of the store is only logged, too: the effect has happened, and
        must not happen again because of a missing mark. In a transaction they raise StoreError.
        """
        self._mark(Key(provider, message_id), None)

    def mark_failed(self, message_id: Id, provider: str, error_message: str) -> None:
        """The handler has failed, and does not run again.

        The text is kept under "error" in the metadata; the other metadata stays.
        """
        self._mark(Key(provider, message_id), error_message)

    def cleanup(self, days: float = 30) -> int:
        """Remove records that were not seen for so many days, and return how many.

        Never those in processing. Raises ConfigError inside a transaction.
        """
        if not isinstance(self._calls, Ledger):
            raise ConfigError(
                "cleanup: it needs its own transactions; call it on a repository of the ledger, "
                "not of an inbox"
            )
        return self._calls.purge(timedelta(days=days))

    def _mark(self, key: Key, error_message: str | None) -> None:
        try:
            record = self._calls.find(key)
            if record is None:
                raise FencedError("there is no record")
            # Another process may have begun the record: a claim is made of the record itself.
            if error_message is None:
                self._calls.complete(claim_of(record))
            else:
                self._calls.fail(claim_of(record), error_message)
        except FencedError:
            _log.warning(
                "message '%(message_id)s' of '%(consumer)s' could not be marked: it is not being "
                "processed",
                extra={"event": "not_marked", **key._asdict()},
            )
        except StoreError:
            # Inside a transaction nothing is stored after an error, and the caller must know.
            if not isinstance(self._calls, Ledger):
                raise
            _log.exception(
                "message '%(message_id)s' of '%(consumer)s' could not be marked: %(reason)s; its "
                "effect has happened",
                extra={"event": "marking_failed", **key._asdict()},
            )
