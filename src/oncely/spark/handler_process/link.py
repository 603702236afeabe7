"""Links: the protocol between a task in the handlers' process and its supervisor.

It is JSON, and Arrow's own format for rows. The task asks for rows, and reports which are settled.
If the process dies, the supervisor gives the rows that are not settled to the next process.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
from pyarrow import RecordBatch

from oncely.core.errors import OncelyError
from oncely.core.record import Key
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.message_rows import Row
from oncely.spark.sink.quarantine import entry_of

NEXT, TOLD, ADOPTED, DONE, RAISED = "next", "told", "adopted", "done", "raised"
"""A task's messages: it wants rows; rows are settled; a row is unusable; the task has ended; it has
raised."""
ROWS, END, BROKEN = "rows", "end", "broken"
"""The supervisor's answers."""


class BrokenInputError(OncelyError):
    """Spark raised while it read the rows of a task; the supervisor raises that error itself."""


def send(connection: Connection, said: Mapping[str, Any]) -> None:
    """Send a message. Raises OSError if the other side is gone."""
    connection.send_bytes(json.dumps(said).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """The next message. Raises EOFError or OSError if the other side is gone."""
    said: dict[str, Any] = json.loads(connection.recv_bytes())
    return said


def send_rows(connection: Connection, numbers: Sequence[int], rows: RecordBatch) -> None:
    """Send rows, each with its number in the task."""
    follow = isinstance(numbers, range)
    send(connection, {"is": ROWS, "first": numbers[0]} if follow else {"is": ROWS, "at": numbers})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_batch(rows)
    connection.send_bytes(out.getvalue())


class TaskLink:
    """The task's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._aside: list[dict[str, str | None]] = []

    def batches(self) -> Iterator[tuple[Sequence[int], RecordBatch]]:
        """The task's rows, and their numbers. Raises BrokenInputError."""
        while True:
            send(self._connection, {"is": NEXT})
            said = receive(self._connection)
            if said["is"] == END:
                return
            if said["is"] == BROKEN:
                raise BrokenInputError("Spark failed to read the input of the task")
            with pa.ipc.open_stream(self._connection.recv_bytes()) as reader:
                rows = reader.read_next_batch()
            first = said.get("first", 0)
            yield said.get("at") or range(first, first + rows.num_rows), rows

    def add(self, row: Row, reason: str) -> None:
        """Put a row into the quarantine, with the next report."""
        self._aside.append(entry_of(row, reason))

    def tell(self, settled: Sequence[int], counts: Counts) -> None:
        """Report that these rows are settled, and the task's counts with them."""
        said = {"is": TOLD, "settled": settled, "counts": vars(counts), "aside": self._aside}
        send(self._connection, said)
        self._aside = []

    def adopt(self, number: int, key: Key) -> None:
        """Report the number of a message that was taken from the ledger, which is not a row's."""
        send(self._connection, {"is": ADOPTED, "number": number, "key": key})
