"""`oncely report`: the file that it writes, and what it says."""

import json
import os
import re
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
from tests.cli.conftest import Command, OnFile
from tests.records import granted

from oncely import Key, open_ledger
from oncely.core.errors import StoreUnavailable


def test_written(filled: OnFile, command: Command, tmp_path: Path) -> None:
    """The file has what is in the ledger; the command says what is stuck, and ends well. As JSON it
    says what `oncely status --json` does, and the file.
    """
    file = tmp_path / "report.html"
    ran = command("report", "--to", str(file))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{file}: stuck: 1 in doubt (oldest: ")
    page = file.read_text(encoding="utf-8")
    assert "doubtful" in page
    assert filled.url in page
    assert [each.name for each in tmp_path.iterdir() if "report" in each.name] == [file.name]
    said = json.loads(command("report", "--to", str(file), "--json").out)
    status = json.loads(command("status", "--json").out)
    assert said.pop("file") == str(file)
    assert said.keys() == status.keys()
    assert said["total"]["completed"] == status["total"]["completed"] == 1


def test_what_is_not_a_file_stays(filled: OnFile, command: Command, tmp_path: Path) -> None:
    """A pipe is refused and not replaced; of a link to a file, the file is replaced."""
    pipe, link, file = (tmp_path / name for name in ("pipe", "link", "report.html"))
    os.mkfifo(pipe)
    ran = command("report", "--to", str(pipe))
    assert ran.code == 2
    assert "is not a file; name one" in ran.err
    assert pipe.is_fifo()
    file.touch()
    link.symlink_to(file)
    assert command("report", "--to", str(link)).code == 0
    assert link.is_symlink()
    assert "<!doctype html>" in file.read_text(encoding="utf-8")


def test_table_and_schema(postgresql_url: str, command: Command, tmp_path: Path) -> None:
    """Of the table that is named; the file says which, without the password."""
    with closing(open_ledger(postgresql_url, table="shop_messages", schema="billing")) as ledger:
        ledger.migrate()
        ledger.complete(granted(ledger.claim(Key("shop", "order-17"))))
    file = tmp_path / "report.html"
    url = re.sub(r"//(\w+)@", r"//\1:geheim@", postgresql_url)
    given = ("--ledger", url, "--table", "shop_messages", "--schema", "billing")
    ran = command("report", "--to", str(file), *given)
    assert ran.code == 0, ran.err
    page = file.read_text(encoding="utf-8")
    assert ", table shop_messages, schema billing</span>" in page
    assert "order-17" not in page  # It is completed.
    assert '<th scope="row" data-label="consumer">shop</th>' in page
    assert ":***@" in page
    assert "geheim" not in page


def test_secret_of_the_ledger_is_not_in_it(
    filled: OnFile, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that env:NAME names is named so."""
    monkeypatch.setenv("SHOP_LEDGER", filled.url)
    file = tmp_path / "report.html"
    ran = command("report", "--to", str(file), "--ledger", "env:SHOP_LEDGER")
    assert ran.code == 0, ran.err
    page = file.read_text(encoding="utf-8")
    assert "env:SHOP_LEDGER" in page
    assert filled.url not in page


def test_whole_or_not_at_all(
    filled: OnFile, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ledger goes away, an existing file stays as it was, and nothing is beside it."""

    def away(*_: object, **__: object) -> NoReturn:
        raise StoreUnavailable("the database has gone")

    folder = tmp_path / "reports"
    folder.mkdir()
    file = folder / "report.html"
    file.write_text("yesterday's")
    monkeypatch.setattr("oncely.web.contents.audit", away)
    code, _, err = command("report", "--to", str(file))
    assert code == 3
    assert "the database has gone" in err
    assert file.read_text() == "yesterday's"
    assert list(folder.iterdir()) == [file]
