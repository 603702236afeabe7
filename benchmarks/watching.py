"""What it costs writers that operators can look: the index of what is not completed, and counting.

Claims and completes batches in turn with and without each, and adds up the processor time of this
process and of the server, which other programs on the machine change little. Run with
`make bench-watching`.
"""

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from uuid import uuid4

from rich.console import Console
from rich.progress import track
from rich.table import Table
from sqlalchemy import create_engine, text
from tests.servers import Postgresql

from oncely import Key
from oncely.core.commands import Granted
from oncely.ledger.ledger import Ledger, open_ledger

_INDEX = "processed_messages_unfinished"
_MADE = f"CREATE INDEX {_INDEX} ON processed_messages (status) WHERE status <> 'sent'"
_BATCH = 1_000
_TICKS_S = os.sysconf("SC_CLK_TCK")
_KINDS = [(False, False), (False, True), (True, False), (True, True)]
"""With the index or without, and with counting or without."""


def written(ledger: Ledger, batches: int) -> None:
    """Claim and complete so many batches of new messages."""
    for _ in range(batches):
        outcomes = ledger.claim_many([Key("billing", uuid4().hex) for _ in range(_BATCH)])
        ledger.complete_many([each.claim for each in outcomes if isinstance(each, Granted)])


def processor_s(server: int | None) -> float:
    """Of this process, and of a server's with its children, ended or not."""
    own = sum(os.times()[:2])
    return own + sum(map(_used_s, [] if server is None else _family(server)))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for each in Path("/proc").glob("[0-9]*"):
        if _fields(int(each.name))[1:2] == [str(pid)]:
            yield int(each.name)


def _used_s(pid: int) -> float:
    return sum(map(int, _fields(pid)[11:15])) / _TICKS_S


def _fields(pid: int) -> list[str]:
    """What the system knows of a process, from its state on; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def measured(
    url: str, server: int | None, rounds: int, batches: int
) -> Mapping[tuple[bool, bool], float]:
    """Microseconds of processor time for each message, by kind."""
    took: dict[tuple[bool, bool], list[float]] = defaultdict(list)
    with ExitStack() as opened:
        counting, silent = (opened.enter_context(closing(open_ledger(url))) for _ in range(2))
        counting.migrate()
        silent.recorder.is_silent = True
        engine = create_engine(url)
        opened.callback(engine.dispose)
        written(counting, 4 * batches)
        for number in track(range(rounds), "rounds"):
            # Each kind comes as often after as before each other.
            for kind in _KINDS[:: 1 if number % 2 else -1]:
                is_indexed, counts = kind
                with engine.begin() as connection:
                    connection.execute(text(f"DROP INDEX IF EXISTS {_INDEX}"))
                    if is_indexed:
                        connection.execute(text(_MADE))
                ledger = counting if counts else silent
                written(ledger, 1)
                began = processor_s(server)
                written(ledger, batches)
                took[kind].append((processor_s(server) - began) / (batches * _BATCH) * 1e6)
    return {kind: statistics.median(each) for kind, each in took.items()}


@contextmanager
def places() -> Iterator[Mapping[str, tuple[str, int | None]]]:
    """The URL of each ledger, and the process of its server."""
    with tempfile.TemporaryDirectory() as folder, Postgresql() as server:
        pid = int((server.data / "postmaster.pid").read_text().split()[0])
        yield {
            "postgresql": (server.url, pid),
            "sqlite": (f"sqlite:///{Path(folder, 'ledger.db')}", None),
        }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, default=15, help="in each round, of each kind")
    parsed = parser.parse_args()
    table = Table("store", "index", "counting", "us a message", "more")
    with places() as found:
        for store, (url, server) in found.items():
            took = measured(url, server, parsed.rounds, parsed.batches)
            for kind in _KINDS:
                more = 100 * (took[kind] / took[_KINDS[0]] - 1)
                words = ["with" if each else "without" for each in kind]
                table.add_row(store, *words, f"{took[kind]:.1f}", f"{more:+.1f} %")
    Console().print(table)


if __name__ == "__main__":
    main()
