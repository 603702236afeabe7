"""Links: what a task in a handler's process and its supervisor tell each other.

JSON, and Arrow's own format for rows. The task asks for rows, and tells which are settled; whoever
has not heard that of a row gives it to the next process, should this one die.
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
"""What a task says: it wants rows; this is settled; this one is not a row; it is through; it has
raised."""
ROWS, END, BROKEN = "rows", "end", "broken"
"""What it is answered."""


class BrokenInputError(OncelyError):
    """Spark raised where the rows of a task come from; the supervisor raises that itself."""


def send(connection: Connection, said: Mapping[str, Any]) -> None:
    """Say something. Raises OSError where nobody is there."""
    connection.send_bytes(json.dumps(said).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """What is said next. Raises EOFError or OSError where nobody is there any more."""
    said: dict[str, Any] = json.loads(connection.recv_bytes())
    return said


def send_rows(connection: Connection, numbers: Sequence[int], rows: RecordBatch) -> None:
    """Give rows, each with its number in the task."""
    follow = isinstance(numbers, range)
    send(connection, {"is": ROWS, "first": numbers[0]} if follow else {"is": ROWS, "at": numbers})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_batch(rows)
    connection.send_bytes(out.getvalue())


class TaskLink:
    """A task's end."""

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
                raise BrokenInputError("the input of the task is broken")
            with pa.ipc.open_stream(self._connection.recv_bytes()) as reader:
                rows = reader.read_next_batch()
            first = said.get("first", 0)
            yield said.get("at") or range(first, first + rows.num_rows), rows

    def add(self, row: Row, reason: str) -> None:
        """Put a row into the quarantine, when the next is told."""
        self._aside.append(entry_of(row, reason))

    def tell(self, settled: Sequence[int], counts: Counts) -> None:
        """These rows are settled, and that is what the task has come to with them."""
        said = {"is": TOLD, "settled": settled, "counts": vars(counts), "aside": self._aside}
        send(self._connection, said)
        self._aside = []

    def adopt(self, number: int, key: Key) -> None:
        """A message that was taken from where it waited has that number, none of a row."""
        send(self._connection, {"is": ADOPTED, "number": number, "key": key})
