"""Pipelines that write rows, and pipelines whose handlers send: whole runs, on real servers."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from tests.cli.conftest import Command, Project
from tests.conditions import LIMIT_S
from tests.servers import free_port
from tests.spark.payments import Place

from oncely import State, open_ledger, open_transport
from oncely.transports.transport import Transport

_QUEUE = "orders"


def keep_secret(project: Project, **urls: str) -> None:
    for name, url in urls.items():
        (project.folder / f"{name}.url").write_text(url)
        project.tables["pipeline"][name] = f"file:{name}.url"


def received(transport: Transport, count: int) -> list[str]:
    """For which messages the bodies of a queue were sent, sorted; it has `count`, and no more."""
    taken: list[str] = []
    while len(taken) < count:
        deliveries = transport.receive(_QUEUE, count - len(taken), LIMIT_S)
        assert deliveries, f"only {len(taken)} of {count} have come"
        taken += [json.loads(delivery.message.body)["for"] for delivery in deliveries]
    assert transport.receive(_QUEUE, 1, 0.2) == []
    return sorted(taken)


@pytest.mark.in_turn("pipelines")
@pytest.mark.timeout(900)
def test_rows_are_in_their_table_once(project: Project, postgresql_url: str) -> None:
    """Each row by the expressions of the file, with its record; run again, only what is new."""
    place = Place(postgresql_url, project.folder)
    keep_secret(project, ledger=postgresql_url)
    del project.tables["pipeline"]["handler"]
    del project.tables["message"]["body"]
    project.tables["pipeline"] |= {"mode": "rows", "table": "payments", "quarantine": "quarantine"}
    project.tables["source"]["schema"] = "id STRING, who STRING, cents INT"
    project.tables["columns"] = {"account": "upper(who)", "amount": "cents * 10"}

    def put(name: str, *rows: tuple[str, int]) -> None:
        lines = [json.dumps({"id": id_, "who": "ann", "cents": cents}) for id_, cents in rows]
        (project.folder / "in" / name).write_text("\n".join(lines))

    put("1.json", *((f"m{n}", n + 1) for n in range(300)), ("m7", 8), ("", 1), ("refused", -1))
    first = project.run()
    assert (first["handled"], first["duplicates"]) == (300, {"input": 1, "ledger": 0})
    assert sum(first["quarantined"].values()) == 2
    assert set(place.set_aside()) == {"", "refused"}
    shutil.rmtree(project.folder / "out" / "checkpoint")
    put("2.json", ("m300", 301))
    second = project.run()
    assert (second["handled"], second["duplicates"]) == (1, {"input": 0, "ledger": 301})
    assert place.rows() == sorted((f"m{n}", "ANN", (n + 1) * 10, None) for n in range(301))
    assert place.ledger.counts()["tests", State.COMPLETED] == 301
    place.close()


BOOKING = """
from pathlib import Path

HERE = Path(__file__).parent

def book(messages, batch_key):
    if (HERE / "closed").exists():
        raise OSError("the target is closed")
    messages.write.mode("overwrite").parquet(str(HERE / "target" / batch_key))
"""


@pytest.mark.in_turn("pipelines")
def test_a_batch_handler(project: Project) -> None:
    """It gets what is new; the next run takes up a batch that has failed, also without input."""
    del project.tables["pipeline"]["handler"]
    project.tables["pipeline"] |= {"handler_batch": "booking:book", "staging": "out/staging"}
    project.tables["policy"] = {"backoff": "1ms"}
    (project.folder / "booking.py").write_text(BOOKING)
    project.put("1.json", [*(f"m{n}" for n in range(50)), "m1", ""])
    (project.folder / "closed").touch()
    first = project.run()
    assert (first["handled"], first["waiting"], first["duplicates"]["input"]) == (0, 50, 1)
    assert sum(first["quarantined"].values()) == 1
    (project.folder / "closed").unlink()
    second = project.run()
    assert (second["received"], second["handled"]) == (50, 50)
    project.put("2.json", ["m1", "m50"])
    third = project.run()
    assert (third["handled"], third["duplicates"]["ledger"]) == (1, 1)
    booked = pq.read_table(project.folder / "target")
    assert sorted(booked.column("id").to_pylist()) == sorted(f"m{n}" for n in range(51))
    assert booked.column_names == ["id", "body"]
    assert list((project.folder / "out" / "staging").iterdir()) == []


def write_rows(project: Project, table: str, columns: dict[str, str]) -> Path:
    """Let the pipeline write into a table beside its ledger, in SQLite; return the file."""
    del project.tables["pipeline"]["handler"]
    del project.tables["message"]["body"]
    project.tables["pipeline"] |= {"mode": "rows", "table": table}
    project.tables["source"]["schema"] = "id STRING, who STRING, cents INT"
    project.tables["columns"] = columns
    file = project.folder / "out" / "ledger.db"
    file.parent.mkdir()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE payments (id TEXT, account TEXT UNIQUE, amount INTEGER)")
    return file


@pytest.mark.in_turn("pipelines")
def test_of_rows_with_one_key_the_last_stays(project: Project) -> None:
    """One task writes them, in their order; no more than `writers` tasks are at work."""
    file = write_rows(project, "payments", {"account": "who", "amount": "cents"})
    project.tables["pipeline"] |= {"upsert": ["account"], "partitions": 6, "writers": 3}
    rows = [{"id": f"m{n:03}", "who": f"a{n % 3}", "cents": n} for n in range(600)]
    rows += [{"id": "", "who": f"b{n}", "cents": n} for n in range(50)]
    (project.folder / "in" / "1.json").write_text("\n".join(map(json.dumps, rows)))
    assert project.run()["handled"] == 600
    aside = (project.folder / "out" / "quarantine").glob("*.parquet")
    assert sorted(file.name[-13:] for file in aside) == [f"{n:05d}.parquet" for n in range(3)]
    with closing(sqlite3.connect(file)) as connection:
        found = connection.execute("SELECT account, amount FROM payments").fetchall()
    assert sorted(found) == [("a0", 597), ("a1", 598), ("a2", 599)]


@pytest.mark.in_turn("pipelines")
def test_rows_in_a_lake(project: Project) -> None:
    """A table of Delta is relative to the file, and is created; a lost checkpoint is harmless."""
    write_rows(project, "delta:out/payments", {"amount": "cents"})
    rows = [{"id": id_, "cents": 2} for id_ in ("a", "b", "a", "")]
    (project.folder / "in" / "1.json").write_text("\n".join(map(json.dumps, rows)))
    for handled in (2, 0):
        report = project.run()
        told = (report["handled"], sum(report["duplicates"].values()), report["quarantined"])
        assert told == (handled, 3 - handled, {"empty id": 1})
        shutil.rmtree(project.folder / "out" / "checkpoint")
    table = DeltaTable(project.folder / "out" / "payments").to_pyarrow_table()
    assert sorted(map(tuple, map(dict.values, table.to_pylist()))) == [("a", 2), ("b", 2)]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("table", "columns", "said"),
    [
        ("paymnts", {"account": "who"}, "table: "),
        ("payments", {"acount": "who"}, "column acount: there is no such column in the table"),
        ("payments", {"amount": "who"}, "column 'amount' is string"),
        ("iceberg:no.such.table", {"amount": "cents"}, "table: the catalog 'no' cannot be used"),
    ],
)
def test_what_the_database_alone_can_tell_is_a_mistake_too(
    project: Project, table: str, columns: dict[str, str], said: str
) -> None:
    """A table or a column that is not there: one line that names the file, and exit code 2."""
    write_rows(project, table, columns)
    (project.folder / "in" / "1.json").write_text('{"id": "m1", "who": "ann"}')
    code, err = project.outcome()
    assert code == 2
    [told] = [line for line in err.splitlines() if line.startswith("oncely: ")]
    assert told.startswith(f"oncely: {project.file}: {said}")


@pytest.mark.in_turn("pipelines")
@pytest.mark.timeout(900)
def test_what_handlers_send_is_sent(
    project: Project, command: Command, postgresql_url: str, rabbitmq_url: str
) -> None:
    """By the tasks, to the transport of the file; by a relay, where the broker was away then."""
    early, late = [f"e{n}" for n in range(40)], [f"l{n}" for n in range(40)]
    project.tables["pipeline"]["handler"] = "handlers:send"
    away = f"amqp://guest:guest@127.0.0.1:{free_port()}/"
    keep_secret(project, ledger=postgresql_url, transport=away)
    project.put("1.json", early)
    assert project.run()["handled"] == len(early)
    with (
        closing(open_ledger(postgresql_url)) as ledger,
        closing(open_transport(rabbitmq_url)) as transport,
    ):
        assert ledger.counts() == {("tests", State.HANDLED): len(early)}
        at = ("--ledger", postgresql_url, "--transport", rabbitmq_url)
        # Whoever consumes the queue has made it; a relay makes none.
        transport.subscribe(_QUEUE, [])
        # What the task could not send it has let go of.
        assert command("relay", "--drain", *at).code == 0
        assert ledger.counts() == {("tests", State.COMPLETED): len(early)}
        keep_secret(project, transport=rabbitmq_url)
        project.put("2.json", late)
        assert project.run()["handled"] == len(late)
        assert ledger.counts() == {("tests", State.COMPLETED): len(early) + len(late)}
        assert received(transport, len(early) + len(late)) == sorted(early + late)
    assert project.effects() == dict.fromkeys(early + late, 1)
