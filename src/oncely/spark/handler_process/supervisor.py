"""The supervisor: feeds a task in a process of its own, and starts another if that dies.

It lives in Spark's Python worker. It is told which rows are settled, and sends the others again.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, NamedTuple, cast

import pyarrow as pa
from pyarrow import RecordBatch

from oncely._util.event_log import EventLog
from oncely.core import errors
from oncely.core.errors import OncelyError
from oncely.core.record import Key
from oncely.spark.handler_process import link
from oncely.spark.handler_process.handler_process import HandlerProcess, TaskOrder
from oncely.spark.handler_process.task_context import context_of_task
from oncely.spark.modes.start import Entry, TaskState
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import SinkOptions

_log = EventLog(__name__)

_LOOK_S = 0.2
_MOST_DEATHS = 3
"""The most deaths in a row without a begun handler: then it is not a message that kills."""

_processes: list[HandlerProcess] = []
"""The processes of this worker; all but the last are about to end."""


class _Given(NamedTuple):
    """Rows that were sent, and their numbers."""

    numbers: Sequence[int]
    rows: RecordBatch

    def left(self, is_settled: Sequence[int]) -> "_Given":
        """Those that are not settled, in less memory: these may wait for long."""
        indexes = [index for index, number in enumerate(self.numbers) if not is_settled[number]]
        if len(indexes) == len(self.numbers):
            return self
        rows = self.rows.take(pa.array(indexes, pa.int64()))
        return _Given([self.numbers[index] for index in indexes], rows)


class TaskSupervisor:
    """Supervises one task. Rows that are not messages go to `quarantine`; `name` is the same for
    all attempts of the task.
    """

    def __init__(self, options: SinkOptions, quarantine: Quarantine, name: str) -> None:
        self._options = options
        self._quarantine = quarantine
        self._name = name
        self._state = TaskState()
        self._is_settled = bytearray()
        """Of each row that was sent, by its number."""
        self._given: list[_Given] = []
        self._again: list[_Given] = []
        """The rows to send to the next process first."""
        self._deaths = 0

    def run(self, batches: Iterator[RecordBatch]) -> Counts:
        """Run the task over these rows; return its counts. Raises the task's own errors."""
        while True:
            # The process of this worker: the living one, or a new one.
            _processes[:] = [process for process in _processes if process.death() is None]
            if not _processes or _processes[-1].connection.closed:
                _processes.append(HandlerProcess())
            process = _processes[-1]
            self._state.counts.received = self._state.counts.settled
            self._given = self._left()
            self._again = [*self._given]
            context = context_of_task()
            order = TaskOrder(self._name, self._options, context, sys.path, self._state)
            try:
                with _line():
                    process.connection.send(order)
                ended = self._oversee(process, batches)
            except _LineBrokenError as error:
                _log.debug(
                    "the connection to the process of the handlers has ended: %(reason)s",
                    exc_info=error,
                    extra={"event": "handler_process_disconnected"},
                )
                self._note_death(process.buried(), process.journal.entries())
            except BaseException:
                # The process is in the middle of the task.
                process.leave()
                raise
            else:
                if isinstance(ended, Counts):
                    return ended
                raise ended

    def _oversee(
        self, process: HandlerProcess, batches: Iterator[RecordBatch]
    ) -> Counts | BaseException:
        """The counts of the task, or its error."""
        broken: BaseException | None = None
        while True:
            said = _hear(process)
            match said["is"]:
                case link.NEXT:
                    broken = self._give(process, batches)
                case link.TOLD:
                    self._note(said)
                case link.ADOPTED:
                    self._state.adopted[said["number"]] = Key(*said["key"])
                case link.DONE:
                    return Counts(**said["counts"])
                case link.RAISED:
                    module, _, name = said["type"].rpartition(".")
                    kind = getattr(errors, name, None) if module == errors.__name__ else None
                    text = said["text"]
                    error = OncelyError(f"{name}: {text}") if kind is None else kind(text)
                    error.__cause__ = _RemoteError(f"\n{said['trace']}")
                    return broken or cast(Exception, error)

    def _give(
        self, process: HandlerProcess, batches: Iterator[RecordBatch]
    ) -> BaseException | None:
        """Send the next rows, if there are any; return the error if Spark fails to read them."""
        broken = given = None
        try:
            given = self._again.pop(0) if self._again else None
            rows = given or next((each for each in batches if each.num_rows), None)
            if isinstance(rows, RecordBatch):
                first = len(self._is_settled)
                self._is_settled += bytes(rows.num_rows)
                given = _Given(range(first, len(self._is_settled)), rows)
                self._given = [*self._left(), given]
        except BaseException as error:  # noqa: BLE001 - raised once the task has stopped.
            broken = error
        with _line():
            if given is not None:
                link.send_rows(process.connection, given.numbers, given.rows)
            else:
                end = link.END if broken is None else link.BROKEN
                link.send(process.connection, {"is": end})
        return broken

    def _left(self) -> list[_Given]:
        """The rows that were sent, and are not settled."""
        left = (given.left(self._is_settled) for given in self._given)
        return [given for given in left if given.numbers]

    def _note(self, said: Mapping[str, Any]) -> None:
        if said["settled"]:
            self._deaths = 0
        self._state.counts = Counts(**said["counts"])
        for entry in said["aside"]:
            self._quarantine.add_entry(entry)
        for number in said["settled"]:
            self._state.inherited.pop(number, None)
            if number < 0:
                self._state.adopted.pop(number, None)
            else:
                self._is_settled[number] = True

    def _note_death(self, death: str, begun: Sequence[Entry]) -> None:
        _log.warning(
            "the process of the handlers %(death)s; another is started",
            extra={"event": "handler_process_died", "death": death},
        )
        state = self._state
        state.death = death
        state.inherited |= {entry.number: entry for entry in begun}
        at_work = [entry.number for entry in begun if not entry.has_returned]
        if begun:
            state.culprit = at_work[0] if len(at_work) == 1 else None
            state.is_alone |= not at_work
        self._deaths = 0 if at_work else self._deaths + 1
        if self._deaths >= _MOST_DEATHS:
            raise OncelyError(
                f"the handlers' process {death}, {self._deaths} times, while no handler ran"
            )


def _hear(process: HandlerProcess) -> dict[str, Any]:
    with _line():
        while not wait([process.connection], _LOOK_S):
            # Children of its handlers may live on, and keep its end of the connection open.
            if process.death() is not None and not wait([process.connection], 0):
                raise EOFError
        return link.receive(process.connection)


class _LineBrokenError(Exception):
    """The connection to the process is closed."""


@contextmanager
def _line() -> Iterator[None]:
    """Raises _LineBrokenError, and no other error, if the process has died."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise _LineBrokenError from error


class _RemoteError(Exception):
    """The traceback of an error in the other process."""
