"""One Spark task in mode `transactional`: each chunk is one transaction.

Claims, the handlers' writes and deferred messages, and completions commit together, or none of them
does. If one message of a chunk fails, each message gets a transaction of its own.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from oncely.core.commands import Busy, Granted, Waiting
from oncely.core.errors import HandlerDied, UnstorableMessage
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.ledger.driver import Driver, run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.transacting import TransactionSource, run, run_together
from oncely.lifecycle.wrapping import is_async
from oncely.spark.modes.chunks import ChunkTask
from oncely.spark.modes.row_turn import RowTurn
from oncely.spark.modes.start import Entry, Start
from oncely.spark.modes.tally import FIRST_POLL_S, Aside
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.sink_options import SinkOptions


class TransactionalTask(ChunkTask):
    """Calls `handler` with each message and a SQLAlchemy Session of `begins`."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        handler: Callable[[Message, Any], Any],
        aside: Aside,
        channel: TaskChannel,
        begins: TransactionSource,
        start: Start | None = None,
    ) -> None:
        super().__init__(ledger, options, handler, aside, channel, start)
        self._begins = begins
        if is_async(handler):
            runner = self._opened.enter_context(asyncio.Runner())
            # In the caller's context, which has the message that is being processed.
            self._handler = lambda message, session: runner.run(
                handler(message, session), context=copy_context()
            )

    def _process(self, turns: Sequence[RowTurn]) -> None:
        if not self._start.is_alone and self._are_stored_together(turns):
            self._count_ended(turns)
            return
        for turn in turns:
            self._channel.raise_if_stopping()
            if turn.ending is None:
                self._run_alone(turn)
            self._count_ended([turn])

    def _inherit(self, turn: RowTurn, entry: Entry) -> bool:
        if entry.has_returned:
            # Rolled back with its transaction, and not its own fault.
            return False
        error = HandlerDied(f"its process {self._start.death}")
        # Not that of the dead process, whose claim went with its transaction.
        turn.token = None
        turn.message = turn.row.message()
        while True:
            run_inline(self._lifecycle.record_failure(self._driver, turn, error))
            if not isinstance(turn.outcome, Busy):
                self._count_ended([turn])
                return True
            # The database has not noticed yet that the client is gone.
            self._channel.wait(time.monotonic() + FIRST_POLL_S)
            turn.begins_anew()

    def _are_stored_together(self, turns: Sequence[RowTurn]) -> bool:
        """Run all in one transaction; return whether all succeeded. If not, nothing is stored."""

        def run_all(session: Any, driver: Driver) -> bool:
            for turn in turns:
                if turn.claim is None:
                    continue
                if self._channel.stopping.is_set():
                    return False
                self._start.journal.begin(turn.row.number, turn.claim.fence)
                with turn.calling(driver, self._lifecycle) as message:
                    turn.returned(self._lifecycle.kept(turn, self._handler(message, session)))
                self._start.journal.returned(turn.row.number)
                if turn.error is not None:
                    return False
            return True

        if len(turns) < 2:
            return False
        are_stored = run_together(self._lifecycle, self._begins, turns, run_all)
        if not are_stored:
            self._start.journal.clear()
        return are_stored

    def _run_alone(self, turn: RowTurn) -> None:
        """Run a turn in a transaction of its own. The transaction is repeated if it only lost
        against another one, or while the database is unavailable. Raises any other error that is
        not the message's.
        """

        def call(session: Any) -> Any:
            message = turn.message = turn.row.message()
            self._start.journal.begin(turn.row.number, 0)
            return self._handler(message, session)

        def try_once() -> None:
            try:
                run(self._lifecycle, self._begins, turn, call)
            except BaseException as error:
                # If the ledger does not answer, or a claim was lost, no message is at fault.
                is_of_one = isinstance(error, UnstorableMessage)
                is_unanswered = error is turn.refusal and turn.outcome is None
                if turn.ending is None or (is_unanswered and not is_of_one):
                    raise

        self._steadily(try_once)
        if isinstance(turn.outcome, Waiting) and turn.taken is None:
            # What was written of its delivery went with the transaction.
            key = Key(self._options.consumer, turn.row.id)
            again = self._steadily(lambda: self._ledger.claim(key, policy=self._policy))
            if isinstance(again, Granted):
                self._ledger.release(again.claim)
