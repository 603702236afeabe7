"""Mistakes at the operators' commands, and servers that are away: exit code 1, 2 or 3, one line, no
traceback, nothing done.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Command, InProcess, OnFile
from tests.docs.commands import every_command

from oncely.cli.options import EXAMPLE
from oncely.stores import retrying

WRONG: list[tuple[list[str], str]] = [
    (["show", ""], "ID: empty id"),
    (["show", " "], "ID: empty id"),
    (["reset", "a\0b"], "ID: id with NUL"),
    (["forget", "x" * 256], "ID: too long id"),
    (["show", "a\udcff"], "ID: id with a lone surrogate"),
    (["show", "a", "--consumer", ""], "--consumer: empty consumer"),
    (["list", "--consumer", "a\0"], "--consumer: consumer with NUL"),
    (["list", "--id-contains", "a\udcff"], "--id-contains: text with a lone surrogate"),
    (["list", "--older-than", "soon"], "--older-than: 'soon' is not a duration: write"),
    (["list", "--older-than=-1d"], "--older-than: '-1d' is not a duration"),
    (["list", "--state", "stuck"], "--state: 'stuck' is none of processing, handled, completed, f"),
    (["reset", "--state", "sent"], "--state: 'sent' is none of failed, exhausted, in doubt"),
    (["list", "--limit", "0"], "--limit: '0' is not a whole number from 1"),
    (["list", "--limit", "9" * 5_000], "is not a whole number from 1"),
    (["purge", "--batch", "-1"], "--batch: '-1' is not a whole number from 1"),
    (["purge", "--older-than", "30"], "--older-than: '30' is not a duration"),
    (["purge", "--retention", "90d"], "--retention: '90d' names no consumer; write"),
    (["purge", "--retention", "=90d"], "--retention: empty consumer"),
    (["purge", "--retention", "billing=x"], "--retention: 'x' is not a duration"),
    (["list", "--id-contains"], "option '--id-contains' requires an argument; see: oncely list"),
    (["check", "--lease", "0s"], "lease: a lease of zero"),
    (["check", "--replay-window", "x"], "--replay-window: 'x' is not a duration"),
    (["status", "--table", "a b"], "table: 'a b' is not a name for a table"),
    (["status", "--schema", "s"], "only PostgreSQL, MariaDB and MySQL have schemas"),
    (["status", "--table", "nowhere"], "type: oncely migrate"),
    (["reset"], "retry: name an ID, or filters such as"),
    (["forget", "--limit", "5", "--yes"], "forget: name an ID, or filters such as"),
    (["reset", "a", "--state", "failed"], "retry: an ID takes no filters but --consumer"),
    (["status", "--ledger", "memory://"], '"memory://" is seen by one process only'),
    (["status", "--ledger", "oracle://u:geheim@h"], "'oracle://u:***@h' is not of a known kind"),
    (["status", "--ledger", "env:GEHEIM"], "'env:GEHEIM' is not of a known kind"),
    (["status", "--ledger", "env:NOWHERE"], "the environment variable NOWHERE is not set"),
    (["status", "--ledger", "sqlite:///nowhere.db"], "there is no file 'nowhere.db'"),
    (["migrate", "--ledger", "sqlite:///nowhere/l.db"], "its folder does not exist"),
    (["status", "--ledger", ""], "no ledger is named; add --ledger sqlite:///ledger.db"),
    (["status", "--watch", "soon"], "--watch: 'soon' is not a duration"),
    (["status", "--watch", "0"], "--watch: zero would never"),
    (["list", "--sort", "random"], "invalid value for '--sort': 'random' is not one of 'oldest'"),
    (["list", "--id-begins", "a\0", "--sort", "id"], "--id-begins: text with NUL"),
    (["list", "--id-begins", "a"], "list: --id-begins and --after need --sort id"),
    (["list", "--after", "a", "--sort", "newest"], "list: --id-begins and --after need --sort id"),
    (["relay", "--metrics-port", "70000"], "--metrics-port: '70000' is not a port"),
    (["relay", "--log-level", "loud"], "invalid value for '--log-level': 'loud' is not one of"),
    (["settle", "1"], "settle: add --happened, --not-happened or"),
    (["settle", "1", "--happened", "--not-happened"], "settle: add --happened, --not-happened or"),
    (["relay", "--transport", ""], "no transport is named; add --transport sqlite:///queue.db"),
    (["relay", "--transport", "memory://geheim"], '"memory://" is seen by one process only'),
    (["relay", "--transport", "pigeon://u:geheim@h"], "'pigeon://u:***@h' is not of a known kind"),
    (["relay", "--transport", "env:GEHEIM"], "'env:GEHEIM' is not of a known kind"),
    (["relay", "--transport", "env:NOWHERE"], "the environment variable NOWHERE is not set"),
    (["relay", "--transport", "sqlite:///nowhere/q.db"], "its folder does not exist"),
    (["relay", "--batch", "0"], "--batch: '0' is not a whole number from 1"),
    (["relay", "--tries", "many"], "--tries: 'many' is not a whole number from 1"),
    (["relay", "--poll", "often"], "--poll: 'often' is not a duration"),
    (["relay", "--poll", "0s"], "poll: zero would look"),
    (["bridge", "sqlite:///q.db"], "missing option '--queue'"),
    (["bridge", "memory://x", "--queue", "q"], '"memory://" is seen by one process only'),
    (["bridge", "pigeon://u:geheim@h", "--queue", "q"], "'pigeon://u:***@h' is not of a known"),
    (["bridge", "x://", "--queue", "q", "--files", "x", "--into", "y"], "--into: there is no led"),
    (["bridge", "x://", "--queue", "q", "--ledger", ""], "no ledger is named; add --ledger"),
    (["dead", "show", "order-17"], "'order-17' is not the number of a dead letter; type: oncely"),
    (["dead", "show", "0"], "ID: '0' is not the number of a dead letter"),
    (["dead", "show"], "missing argument 'ID'; see: oncely dead show --help"),
    (["dead", "export"], "missing argument 'FILE'"),
    (["dead", "export", "/no/such/folder/x"], "'/no/such/folder/x' cannot be written: No such"),
    (["dead", "list", "--transport", "x"], "no such option: --transport"),
    (["dead", "retry"], "retry: name the IDs of dead letters, or --all, or --group"),
    (["dead", "retry", "1", "--all"], "retry: name the IDs of dead letters, or --all, or --group"),
    (["dead", "retry", "1", "--group", "x"], "retry: name the IDs of dead letters, or --all, or"),
    (["dead", "retry", "1", "x"], "ID: 'x' is not the number of a dead letter"),
    (["dead", "retry", "1", "--consumer", "shop"], "retry: IDs need no --consumer"),
    (["dead", "retry", "--all", "--consumer", "x"], "no dead letters or records of consumer 'x'"),
    (["dead", "discard"], "discard: name the IDs of dead letters, or --all"),
    (["dead", "edit", "1", "--header", "x"], "--header: 'x' is not a header; write \"NAME=VALUE\""),
    (["dead"], "missing command; see: oncely dead --help"),
    (["report", "--to", "none/report.html"], "there is no folder 'none'"),
    (["report", "--to", "."], "is a folder; name a file"),
    (["report"], "--to"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line(
    at: OnFile,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    """Exit code 2, and a line that says what is wrong; nothing on stdout, no file left behind."""
    monkeypatch.setenv("GEHEIM", "geheim")
    monkeypatch.setenv("ONCELY_TRANSPORT", "sqlite:///queue.db")
    monkeypatch.chdir(at.file.parent)
    before = set(at.file.parent.iterdir())
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("oncely: ")
    assert said in err
    assert err.count("\n") == 1
    assert "geheim" not in err
    assert set(at.file.parent.iterdir()) == before


AWAY = "postgresql://u:geheim@127.0.0.1:1/0"
OTHERS = {"relay", "consume", "bridge", "pipeline run", "archive", "dead discard"}
"""Commands that wait for their ledger, or first need something that their example does not have."""


def asked_of_away() -> Iterator[list[str]]:
    """Each command that needs a ledger, as its example types it, with a ledger that is away."""
    for name, each in every_command():
        if name.removeprefix("oncely ") not in OTHERS and any(
            "--ledger" in param.opts for param in each.params
        ):
            example = (each.epilog or "").partition(EXAMPLE)[2].partition(" > ")[0]
            yield [*shlex.split(example)[1:], "--ledger", AWAY]
    yield ["archive", "--to", "out", "--ledger", AWAY]
    yield ["dead", "discard", "42", "--yes", "--ledger", AWAY]
    yield from (
        ["migrate", "--ledger", f"{kind}://u:geheim@127.0.0.1:1/0"] for kind in ("redis", "mysql")
    )


@pytest.mark.parametrize("arguments", [*asked_of_away()], ids=lambda value: " ".join(value)[:40])
def test_a_server_that_is_away(
    at: OnFile,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    """Exit code 3, whatever was asked for, and a line that names no password."""
    monkeypatch.chdir(at.file.parent)
    monkeypatch.setattr(retrying, "_TRIES", 1)
    code, out, err = command(*arguments)
    assert (code, out) == (3, ""), err
    assert "geheim" not in err
    assert err.splitlines()[-1].startswith("oncely: ")


def test_every_command_refuses_an_unknown_option(command: Command) -> None:
    """Exit code 2, whatever the command is."""
    for name, _ in every_command():
        assert command(*name.split()[1:], "--nonsense").code == 2, name


@pytest.mark.parametrize(
    "name", ["check", "status", "list", "show", "reset", "forget", "purge", "relay"]
)
def test_no_ledger(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Every command says that it needs a ledger, and that the one which is named is not there."""
    monkeypatch.delenv("ONCELY_LEDGER", raising=False)
    id_ = ["a"] if name in ("show", "reset", "forget") else []
    assert command(name, *id_).err == (
        "oncely: no ledger is named; add --ledger sqlite:///ledger.db, or the like\n"
    )
    url = f"sqlite:///{tmp_path}/gone.db"
    ran = command(name, *id_, "--ledger", url)
    missing = f"ledger: there is no file '{tmp_path}/gone.db'"
    assert ran == (2, "", f"oncely: {missing}; type: oncely migrate --ledger {url}\n")


@pytest.mark.parametrize("name", ["status", "list", "purge", "check", "migrate"])
def test_what_is_no_ledger(command: Command, tmp_path: Path, name: str) -> None:
    """A file that is no database is told in one line."""
    file = tmp_path / "notes.txt"
    file.write_text("This is no database. " * 100)
    code, out, err = command(name, "--ledger", f"sqlite:///{file}")
    assert (code, out) == (1, "")
    assert "file is not a database" in err
    assert err.count("\n") == 1


WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from oncely.cli import main
sys.exit(main(sys.argv[2:]))
"""


def without(packages: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command where some packages are not installed."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, packages, *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )


def test_missing_packages(filled: OnFile, tmp_path: Path) -> None:
    """Operators need rich and no more; where it is missing, the extra is named."""
    report = tmp_path / "r.html"
    heavy = "pydantic,pyspark,py4j,pyarrow,matplotlib,starlette,uvicorn"
    ran = without(heavy, "report", "--to", str(report))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "doubtful" in report.read_text(encoding="utf-8")
    for package, words in (("rich", "list"), ("click", "--help")):
        ran = without(package, words)
        said = f"oncely: {package} is not installed; type: pip install 'oncely[cli]'\n"
        assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", said)


def test_nobody_reads_on(filled: OnFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """`oncely list --json | head` ends without a traceback."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-m", "oncely", "list", "--json"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_a_poor_terminal(
    at: OnFile, monkeypatch: pytest.MonkeyPatch, in_process: InProcess
) -> None:
    """What a terminal's encoding lacks is written out."""
    at.fail("c", "é")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ran = in_process("list")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\\xe9" in ran.stdout


@pytest.mark.parametrize(
    "name",
    [
        *("migrate", "check", "status", "list", "show", "reset", "forget", "purge", "archive"),
        *("report", "relay", "consume", "waiting", "pipeline run", "dead list"),
        *("dead show", "dead retry", "dead edit", "dead export", "dead discard"),
    ],
)
def test_every_ledger_has_a_table(command: Command, name: str) -> None:
    """Each command that takes --ledger takes --table and --schema."""
    options = command(*name.split(), "--help").out
    for option in ("--ledger URL", "--table NAME", "--schema NAME"):
        assert option in options
