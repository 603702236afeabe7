"""What one Spark task does with its rows in mode `transactional`: a chunk in one transaction.

Claims, what handlers write and send, and completions commit together, or none of it is stored.
Where one of a chunk fails, each of it gets a transaction of its own.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from oncely.claiming.inline import InlineCalls
from oncely.core.commands import Granted
from oncely.core.errors import ContentionError, StoreUnavailable
from oncely.core.message import Message
from oncely.crashpoints import reached
from oncely.handling.held_message import HeldMessage
from oncely.handling.transacting import Begins, complete_many, retried
from oncely.ledger import Ledger
from oncely.spark.modes.chunks import Answers, ChunkTask, Doubt
from oncely.spark.modes.ends import End, ended_badly, results_of, run_handler
from oncely.spark.sink.channel import Stopped, TaskChannel
from oncely.spark.sink.options import SinkOptions
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.rows import Row

_log = logging.getLogger(__name__)

SessionHandler = Callable[[Message, Any], Any]
"""Takes a message and the SQLAlchemy Session of its transaction."""


class _Committed(NamedTuple):
    """What a transaction came to."""

    answers: Answers
    ends: Sequence[End]


class TransactionalTask(ChunkTask):
    """Hands each message to `handler` with a session that `begins` begins."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        handler: SessionHandler,
        quarantine: Quarantine,
        channel: TaskChannel,
        begins: Begins,
    ) -> None:
        super().__init__(ledger, options, quarantine, channel)
        self._handler = handler
        self._begins = begins

    def _process(self, rows: Sequence[Row], doubt: Doubt | None) -> None:
        together = self._together(rows) if len(rows) > 1 else None
        if together is not None:
            self._count(together, doubt)
            return
        for row in rows:
            self._channel.raise_if_stopping()
            self._count(self._alone(row, doubt), doubt)

    def _count(self, committed: _Committed, doubt: Doubt | None) -> None:
        self._count_ends(committed.ends)
        self._count_refused(committed.answers, doubt)

    def _together(self, rows: Sequence[Row]) -> _Committed | None:
        """All in one transaction; None where it failed, and nothing of it is stored."""
        try:
            return self._transact(rows, None)
        except Stopped:
            raise
        except Exception:  # noqa: BLE001 - each alone tells what is wrong, and with which.
            _log.info("chunk_undone", exc_info=True)
            return None

    def _alone(self, row: Row, doubt: Doubt | None) -> _Committed:
        """In a transaction of its own, which is begun again where it only lost against another."""
        try:
            return retried(self._ledger, lambda: self._transact([row], doubt))
        except _FailedError as failed:
            error = failed.error
        return retried(self._ledger, lambda: self._record(row, doubt, error))

    def _transact(self, rows: Sequence[Row], doubt: Doubt | None) -> _Committed:
        """Raises _FailedError where a handler fails, or the database refuses what it wrote."""
        ends: list[End] = []
        try:
            return self._commit(rows, doubt, ends)
        except (Stopped, StoreUnavailable, ContentionError, _FailedError):
            raise
        except Exception as error:
            # Before a handler has run, and where the database goes away, it is no message's fault.
            if not ends or self._ledger.is_contention(error):
                raise
            raise _FailedError(error) from error

    def _commit(self, rows: Sequence[Row], doubt: Doubt | None, ends: list[End]) -> _Committed:
        """All in one transaction; how each handler ended is added to `ends`."""
        with self._begins.begin() as session, self._ledger.transaction(session) as inbox:
            answers = self._ask(inbox, rows, doubt)
            reached("after_claim")
            calls = InlineCalls(inbox)
            held: list[HeldMessage] = []
            for row, outcome in answers:
                if isinstance(outcome, Granted):
                    self._channel.raise_if_stopping()
                    message = row.message(outcome.claim)
                    held.append(HeldMessage(outcome.claim, calls, message))
                    ends.append(self._run(row, held[-1], message, session))
            complete_many(inbox, held, results_of(ends, self._policy))
            reached("before_commit")
        reached("after_commit")
        return _Committed(answers, [end._replace(stored=True) for end in ends])

    def _run(self, row: Row, held: HeldMessage, message: Message, session: Any) -> End:
        end = run_handler(row, held, message, lambda m: self._handler(m, session), self._policy)
        if end.error is None:
            return end
        if self._ledger.is_contention(end.error):
            raise end.error
        raise _FailedError(end.error) from end.error

    def _record(self, row: Row, doubt: Doubt | None, error: Exception) -> _Committed:
        """Store that the handler has failed: the claim of that try was undone with the rest."""
        ends = []
        with self._begins.begin() as session, self._ledger.transaction(session) as inbox:
            answers = self._ask(inbox, [row], doubt)
            for _, outcome in answers:
                if isinstance(outcome, Granted):
                    end = ended_badly(row, outcome.claim, error, self._policy)
                    inbox.fail(outcome.claim, end.error or error, final=end.kind.is_final)
                    ends.append(end._replace(stored=True))
        return _Committed(answers, ends)


class _FailedError(Exception):
    """It is the message's fault that nothing of its transaction is stored."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error
