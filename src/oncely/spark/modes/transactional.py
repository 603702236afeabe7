"""What one Spark task does with its rows in mode `transactional`: a chunk in one transaction.

Claims, what handlers write and send, and completions commit together, or none of it is stored.
Where one of a chunk fails, each of it gets a transaction of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from oncely.core.message import Message
from oncely.ledger import Ledger
from oncely.lifecycle.transacting import Begins, run, run_together
from oncely.spark.modes.chunks import ChunkTask
from oncely.spark.modes.row_turn import RowTurn
from oncely.spark.sink.channel import Stopped, TaskChannel
from oncely.spark.sink.message_rows import Row
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import SinkOptions


class TransactionalTask(ChunkTask):
    """Hands each message to `handler`, with the SQLAlchemy Session that `begins` begins."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        handler: Callable[[Message, Any], Any],
        quarantine: Quarantine,
        channel: TaskChannel,
        begins: Begins,
    ) -> None:
        super().__init__(ledger, options, handler, quarantine, channel)
        self._begins = begins

    def _process(self, rows: Sequence[Row]) -> None:
        turns = self._turns(rows)
        if not self._are_stored_together(turns):
            for turn in turns:
                self._channel.raise_if_stopping()
                self._run_alone(turn)
        self._count_ended(turns)

    def _are_stored_together(self, turns: Sequence[RowTurn]) -> bool:
        """Whether all of them succeeded in one transaction; else nothing of it is stored."""
        stopped: list[Stopped] = []

        def run_all(session: Any) -> bool:
            try:
                return all(self._succeeds(turn, session) for turn in turns)
            except Stopped as error:
                stopped.append(error)
                return False

        if len(turns) < 2:
            return False
        are_stored = run_together(self._handling, self._begins, turns, run_all)
        if stopped:
            raise stopped[0]
        return are_stored

    def _succeeds(self, turn: RowTurn, session: Any) -> bool:
        if turn.held is None:
            return True
        self._channel.raise_if_stopping()
        keeps_result = self._handling.keeps_result
        turn.run(turn.held, lambda m: self._handler(m, session), keeps_result=keeps_result)
        return turn.error is None

    def _run_alone(self, turn: RowTurn) -> None:
        """In a transaction of its own, which is begun again where it only lost against another.

        Raises what is the database's fault, and no message's.
        """

        def call(session: Any) -> Any:
            claim = None if turn.held is None else turn.held.claim
            return self._handler(turn.row.message(claim), session)

        try:
            run(self._handling, self._begins, turn, call)
        except Exception as error:
            # Where the ledger has not answered, or what it granted is lost, no message is at fault.
            if turn.ending is None or (error is turn.refusal and turn.outcome is None):
                raise
