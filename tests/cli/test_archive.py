"""`oncely archive`: old records as Parquet, on the terminal and across crashes."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import Command, OnFile, Project

from oncely import State
from oncely.spark.pipeline.config import read_config

DAY_S = 86_400.0


def rows(folder: Path) -> list[dict[str, Any]]:
    """Every row that a reader of Parquet finds in an archive."""
    files = [file for file in folder.rglob("*.parquet") if "_unfinished" not in file.parts]
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


@pytest.fixture
def old(at: "OnFile") -> "OnFile":
    """Records of two consumers, last seen 40 days ago; and a new one."""
    for n in range(30):
        at.complete("billing", f"order-{n}", {"receipt": n})
    at.fail("sms", "order-1")
    at.claim("sms", "doubtful")
    at.age(40 * DAY_S)
    at.complete("billing", "new")
    return at


def test_it_says_what_it_moved(old: "OnFile", command: Command, tmp_path: Path) -> None:
    """A line for each consumer; run again, there is nothing left to do."""
    ran = command("archive", "--to", str(tmp_path / "archive"), "--retention", "sms=90d")
    assert ran.code == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["consumer", "archived", "left", "files"] in lines
    assert ["sms", "0", "0", "0"] in lines
    assert len(rows(tmp_path / "archive")) == 30
    again = json.loads(command("archive", "--json", "--to", str(tmp_path / "archive")).out)
    assert again["consumers"]["billing"] == {"archived": 0, "left": 0, "files": 0}
    assert again["total"] == {"archived": 1, "left": 0, "files": 1}
    assert again["audit_error"] is None
    assert old.ledger.counts() == {("billing", State.COMPLETED): 1, ("sms", State.PROCESSING): 1}


def test_it_is_in_the_audit(old: "OnFile", command: Command, tmp_path: Path) -> None:
    """An entry says who moved how many, and why; also where there was nothing to move."""
    to = ("archive", "--to", str(tmp_path / "archive"), "--by", "ann")
    assert command(*to, "--why", "monthly").code == 0
    assert command(*to).code == 0
    entries = [
        (each.by, each.action, each.changed, each.why) for each in old.ledger.operations.audit()
    ]
    assert entries == [("ann", "archived", 0, ""), ("ann", "archived", 31, "monthly")]


def test_of_one_consumer(old: "OnFile", command: Command, tmp_path: Path) -> None:
    """--consumer, --older-than and --batch."""
    given = ["--consumer", "sms", "--older-than", "41d", "--batch", "1", "--json"]
    said = json.loads(command("archive", "--to", str(tmp_path / "a"), *given).out)
    assert said["consumers"] == {"sms": {"archived": 0, "left": 0, "files": 0}}
    assert not rows(tmp_path / "a")


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("{file}", "archive: '{file}' is a file; name a folder"),
        ("nowhere://x/y", "archive: 'nowhere://x/y' is not a folder that can be opened: "),
        ("{file}/below", "archive: '{file}/below' cannot be written to: "),
    ],
)
def test_a_wrong_folder_is_one_line(
    old: "OnFile", command: Command, tmp_path: Path, to: str, said: str
) -> None:
    """And nothing leaves the ledger."""
    file = tmp_path / "file"
    file.touch()
    code, out, err = command("archive", "--to", to.format(file=file))
    assert (code, out) == (2, "")
    assert said.format(file=file) in err
    assert len(err.splitlines()) == 2
    assert len(list(old.ledger.scan(limit=100))) == 33


def test_a_pipeline_names_it(project: Project) -> None:
    """Beside its file, as its other folders are."""
    assert read_config(project.save()).archive is None
    project.tables["pipeline"]["archive"] = "archive"
    (project.folder / "archive").mkdir()
    assert read_config(project.save()).archive == str(project.folder / "archive")
