"""`oncely reconcile`: the example's messages against a ledger in which much has gone wrong."""

import json
import shutil
import subprocess
import sys
from contextlib import chdir, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import OnFile, ran_here, with_real_input
from tests.records import granted

from oncely import Key, Message, State, open_ledger
from oncely.archive.writing import archive
from oncely.cli.reconcile_command import reconciled_table
from oncely.cli.tables import put
from oncely.core.errors import MessageError
from oncely.core.ids import check_id, fingerprint_of
from oncely.spark.operations.reconcile import Reconciliation
from oncely.spark.operations.reconcile_file import read_reconcile_config
from oncely.spark.rabbitmq.spool import Spool
from oncely.spark.session import make_active

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.cli.conftest import Command, InProcess, Main, Project

EXAMPLE = Path(__file__).parents[2] / "examples" / "notifications"
CONSUMER = "notification-service"
DAY_S = 86_400


def good_ids(folder: Path) -> list[str]:
    """The ids of the messages in the example's files that are messages, sorted."""
    ids = set()
    for file in folder.glob("*.jsonl"):
        for line in file.read_bytes().splitlines():
            try:
                ids.add(check_id(json.loads(line).get("id")))
            except (ValueError, AttributeError, MessageError):
                continue
    return sorted(ids)


class Compared(NamedTuple):
    """A run of the command: its code, its JSON, its details, and what was to be found."""

    code: int
    said: dict[str, Any]
    details: dict[str, list[dict[str, Any]]]
    quarantined: list[dict[str, Any]]
    ids: dict[str, list[str]]
    generated: dict[str, Any]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, shared_spark: "SparkSession") -> Compared:
    """The command over the example, its archive, and a ledger with everything that can be."""
    make_active(shared_spark)
    folder = tmp_path_factory.mktemp("reconcile") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("out", "messages*", "__py*"))
    subprocess.run(
        [sys.executable, "generate.py", "--count", "1000"], cwd=folder, check=True, stdout=-3
    )
    generated = json.loads((folder / "messages.expected.json").read_text())
    (folder / "out").mkdir()
    ids = fill(OnFile(folder / "out" / "ledger.db"), good_ids(folder / "messages"), folder)
    (folder / "messages" / "unfit.jsonl").write_text('{"id": "unfit", "payload": 17}\n')
    with chdir(folder):
        ran = ran_here(
            *("reconcile", "pipeline.toml", "--json", "--archive", "archive", "--to", "found")
        )
    assert ran.code in {0, 1}, ran.err
    details: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(folder / "found" / "messages").to_pylist():
        details.setdefault(row["outcome"], []).append(row)
    rows = pq.read_table(folder / "found" / "quarantined").to_pylist()
    return Compared(ran.code, json.loads(ran.out), details, rows, ids, generated)


def fill(at: OnFile, good: list[str], folder: Path) -> dict[str, list[str]]:
    """Records for `good`, and of what is not in the source; return which ids are what."""
    left = iter(good)

    def some(count: int) -> list[str]:
        return [next(left) for _ in range(count)]

    ids = {"archived": some(5), "missing": some(3), "failed": some(3), "in_doubt": some(2)}
    ids |= {"processing": some(2), "rejected": some(1), "mismatch": some(1), "sending": some(1)}
    ids["handled"] = list(left)
    again, *_ = ids["archived"]
    for id_ in (*ids["archived"], "archived-and-gone"):
        at.complete(CONSUMER, id_)
    at.age(40 * DAY_S)
    moved = archive(at.ledger, str(folder / "archive"), "30d", by="")
    assert moved.counts[CONSUMER].archived == len(ids["archived"]) + 1
    for id_ in ids["in_doubt"]:
        at.claim(CONSUMER, id_)
    at.claim(CONSUMER, "in-doubt-and-gone")
    at.age(3_600)
    # Archived, forgotten, and run again: what the ledger knows is newer.
    at.fail(CONSUMER, again)
    ids["failed"].append(again)
    ids["archived"].remove(again)
    for id_ in ids["failed"][1:3]:
        at.fail(CONSUMER, id_, final=True)
    at.fail(CONSUMER, ids["failed"][0])
    for id_ in ids["processing"]:
        at.claim(CONSUMER, id_)
    at.fail(CONSUMER, ids["rejected"][0], "Reject: no recipient", final=True)
    other = at.ledger.claim(Key(CONSUMER, ids["mismatch"][0]), fingerprint="another body's")
    at.ledger.complete(granted(other))
    # Handled, and what it is to send is not sent yet.
    at.ledger.handled(granted(at.ledger.claim(Key(CONSUMER, ids["sending"][0]))))
    for id_ in (*ids["handled"], "gone"):
        at.complete(CONSUMER, id_)
    # Another consumer's records say nothing about this one's.
    at.complete("somebody-else", ids["missing"][0])
    at.ledger.close()
    return ids


def test_every_message_is_found_out_about(compared: Compared) -> None:
    """Handled, also in the archive alone or with messages still to be sent; missing; failed; in
    doubt; and handled elsewhere.
    """
    said, ids = compared.said, compared.ids
    handled = ids["handled"] + ids["sending"] + ids["archived"]
    assert said["handled"] == len(handled)
    assert said["missing"] == len(ids["missing"])
    assert said["failed"] == len(ids["failed"])
    assert said["in_doubt"] == len(ids["in_doubt"])
    assert said["processing"] == len(ids["processing"])
    assert said["not_in_source"] == {"handled": 2, "in_doubt": 1, "failed": 0, "processing": 0}
    assert compared.code == 1


def test_every_row_is_counted_once(compared: Compared) -> None:
    """Received = all the rest; the bad rows by the reasons that a pipeline gives."""
    said, generated = compared.said, compared.generated
    parts = ("handled", "missing", "in_doubt", "failed", "processing", "duplicates")
    assert said["received"] == generated["deliveries"] + 1
    assert said["received"] == sum(said[part] for part in parts) + sum(said["quarantined"].values())
    broken = {why: count for why, count in generated["broken"].items() if why != "no recipient"}
    rejected = said["quarantined"].pop("no recipient")
    mismatched = said["quarantined"].pop("mismatch: the id was seen before with another body")
    assert said["quarantined"] == {**broken, "row does not fit the schema": 1}
    assert rejected >= 1
    assert mismatched >= 1


def test_the_details_are_in_parquet(compared: Compared) -> None:
    """Each message in the folder of its outcome, with what its record says; bad rows whole."""
    details, ids = compared.details, compared.ids
    for outcome in ("missing", "failed", "in_doubt", "processing"):
        assert sorted(row["id"] for row in details[outcome]) == sorted(ids[outcome])
    archived = {row["id"] for row in details["handled"] if row["archived"]}
    assert archived == set(ids["archived"])
    assert {row["error"] for row in details["failed"]} == {"no"}
    gone = {row["id"]: row["record"] for row in details["not_in_source"]}
    assert gone == {
        "gone": "handled",
        "archived-and-gone": "handled",
        "in-doubt-and-gone": "in_doubt",
    }
    [unfit] = [row for row in compared.quarantined if "fit" in row["reason"]]
    assert json.loads(unfit["row"]) == {"id": "unfit", "payload": 17}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything has its line; what a handler said is no markup."""
    found = Reconciliation()
    found.messages.update(handled=1_200, missing=3)
    found.duplicates = 5
    found.quarantined["[red]no recipient"] = 2
    found.not_in_source["handled"] = 7
    put(reconciled_table(found))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["received", "1,210"] in lines
    assert ["missing", "3"] in lines
    assert ["quarantined:", "[red]no", "recipient", "2"] in lines
    assert ["handled,", "but", "not", "in", "the", "source", "7"] in lines


@pytest.mark.parametrize("outcome", ["missing", "failed", "in_doubt"])
def test_what_is_wrong_is_a_failure(outcome: str) -> None:
    """Each of the three alone."""
    found = Reconciliation()
    found.messages.update(handled=1, processing=1)
    found.not_in_source["handled"] = 1
    assert not found.has_failures
    found.messages[outcome] = 1
    assert found.has_failures


@with_real_input
@pytest.mark.timeout(1_800)
def test_real_input(project: "Project", in_process: "InProcess") -> None:
    """After a run over real deliveries none is missing, and one that is forgotten is."""
    expected = project.read_real_input()
    project.run()
    file = str(project.file)
    ran = in_process("reconcile", file, "--json", timeout=540)
    said = json.loads(ran.stdout)
    assert ran.returncode == 0
    assert (said["received"], said["handled"]) == (expected["rows"], expected["unique"])
    assert (said["duplicates"], said["quarantined"]) == (expected["duplicates"], expected["broken"])
    assert not any(said["not_in_source"].values())
    at = OnFile(project.folder / "out" / "ledger.db")
    [record] = at.ledger.scan(limit=1)
    at.ledger.forget(record.key)
    at.ledger.close()
    ran = in_process("reconcile", file, "--json", timeout=540)
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["missing"] == 1


SOURCE = '[source]\nformat = "json"\npath = "in"\n[message]\nid = "id"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with just a source and its mapping."""
    (tmp_path / "in").mkdir()
    (tmp_path / "source.toml").write_text(SOURCE)
    return tmp_path / "source.toml"


def test_a_source_alone_will_do(file: Path, tmp_path: Path) -> None:
    """The rest may be typed; a relative ledger is beside the file."""
    OnFile(tmp_path / "ledger.db").ledger.close()
    config = read_reconcile_config(file, "sqlite:///ledger.db", "billing")
    assert config.consumer == "billing"
    assert config.place.location == f"sqlite:///{tmp_path}/ledger.db"
    assert config.source_path == str(tmp_path / "in")
    assert config.compares_bodies


@pytest.mark.usefixtures("spark")
def test_another_table(project: "Project", command: "Command") -> None:
    """The file, or --table, names where a pipeline keeps its records, and where others find them:
    for the comparison, and for the report.
    """
    project.put("in.json", ["1", "2"])
    project.tables["pipeline"]["ledger_table"] = "others"
    assert project.run()["handled"] == 2
    url = f"sqlite:///{project.folder}/out/ledger.db"
    with closing(open_ledger(url, table="others")) as ledger:
        assert ledger.counts() == {("tests", State.COMPLETED): 2}
    code, out, _ = command("reconcile", str(project.file), "--json")
    assert (code, json.loads(out)["handled"]) == (0, 2)
    project.tables["pipeline"]["checkpoint"] = "out/another"
    file = str(project.save())
    code, out, _ = command("pipeline", "run", file, "--table", "thirds", "--json")
    assert (code, json.loads(out)["handled"]) == (0, 2)
    with closing(open_ledger(url, table="thirds")) as ledger:
        ledger.forget(Key("tests", "2"))
    code, out, _ = command("reconcile", file, "--table", "thirds", "--json")
    found = json.loads(out)
    assert (code, found["handled"], found["missing"]) == (1, 1, 1)
    to = str(project.folder / "report.html")
    code, out, _ = command("report", "--ledger", url, "--table", "thirds", "--to", to, "--json")
    assert (code, json.loads(out)["total"]["records"]) == (0, 1)


QUEUE = """
[pipeline]
consumer = "billing"
ledger = "sqlite:///ledger.db"
[source]
format = "oncely-rabbitmq"
options = { url = "amqp://127.0.0.1:1", queue = "orders", spool = "out/spool" }
"""


def test_a_queue_is_not_read(file: Path, main: "Main", tmp_path: Path) -> None:
    """Reading it would take from a pipeline what it has not handled; what to compare is told."""
    OnFile(tmp_path / "ledger.db").ledger.close()
    file.write_text(QUEUE)
    code, err = main("reconcile", str(file))
    assert code == 2
    assert err.startswith(f"oncely: {file}: [source] format: 'oncely-rabbitmq' would take")
    assert 'format = "parquet", path = "out/spool"' in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


SPOOL = """
[pipeline]
consumer = "billing"
ledger = "sqlite:///ledger.db"
[source]
format = "parquet"
path = "out/spool"
[message]
id = "id"
body = "body"
"""


@pytest.mark.usefixtures("spark")
def test_a_spool_is_compared(file: Path, command: "Command", tmp_path: Path) -> None:
    """What a queue's source has spooled, as the file that is told to write has it; also while
    the pipeline has the spool open, which loses nothing.
    """
    at = OnFile(tmp_path / "ledger.db")
    for id_, body in (("done", b"{}"), ("other", b"[]")):
        claim = at.ledger.claim(Key("billing", id_), fingerprint=fingerprint_of(body))
        at.ledger.complete(granted(claim))
    at.ledger.close()
    file.write_text(SPOOL)
    with closing(Spool(str(tmp_path / "out" / "spool"))) as spool:
        spool.open("orders")
        spool.write([Message("done", b"{}"), Message("never", b"{}"), Message("", b"{}")])
        spool.write([Message("done", b"{}"), Message("other", b"{}")])
        ran = command("reconcile", str(file), "--json")
        assert spool.numbers() == [1, 2]
    assert ran.code == 1, ran.err
    said = json.loads(ran.out)
    assert (said["received"], said["handled"], said["duplicates"]) == (5, 1, 1)
    assert said["missing"] == 1
    mismatch = "mismatch: the id was seen before with another body"
    assert said["quarantined"] == {"missing id": 1, mismatch: 1}


def test_bodies_are_compared_as_the_policy_says(file: Path, tmp_path: Path) -> None:
    """on_mismatch = "ignore" lets another body pass."""
    OnFile(tmp_path / "ledger.db").ledger.close()
    file.write_text(f'{SOURCE}[policy]\non_mismatch = "ignore"\n')
    assert not read_reconcile_config(file, "sqlite:///ledger.db", "billing").compares_bodies


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (SOURCE, ["--ledger", "sqlite:///l.db"], "[pipeline] consumer: is missing"),
        (SOURCE, ["--consumer", "a"], "[pipeline] ledger: is missing"),
        (SOURCE, ["--consumer", "a", "--ledger", "sqlite:///none.db"], "there is no file"),
        (SOURCE, ["--consumer", "a", "--ledger", "memory://"], "seen by one process only"),
        (f'{SOURCE}idd = "id"\n', [], "did you mean 'id'?"),
        ("[source]\n", [], "[source] format: is missing"),
        (SOURCE.replace('"in"', '"nowhere"'), [], "does not exist"),
    ],
)
def test_mistakes(
    file: Path,
    main: "Main",
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    arguments: list[str],
    said: str,
) -> None:
    """A wrong file or option is told in one line, before Spark starts, and leaves nothing."""
    monkeypatch.delenv("ONCELY_LEDGER", raising=False)
    file.write_text(text)
    code, err = main("reconcile", str(file), *arguments)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not list(file.parent.glob("*.db"))


def test_details_never_replace_anything(file: Path, main: "Main", tmp_path: Path) -> None:
    """A folder that holds something is refused."""
    OnFile(tmp_path / "ledger.db").ledger.close()
    given = ("reconcile", str(file), "--consumer", "a", "--ledger", "sqlite:///ledger.db")
    code, err = main(*given, "--to", str(tmp_path))
    assert code == 2
    assert "is not empty; name a new folder" in err
    code, err = main(*given, "--archive", str(tmp_path / "none"))
    assert (code, "there is no folder" in err) == (2, True)
    code, err = main(*given, "--to", str(file))
    assert code == 2
    assert "is a file; name a folder" in err
