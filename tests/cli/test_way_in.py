"""What the command says of itself: help by groups, versions, suggestions, completion in shells."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

import oncely
from oncely.cli.arguments import command_parser
from oncely.cli.overview import GROUPS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Command


def test_groups() -> None:
    """Every command is in one group."""
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(command_parser().subcommands)


def test_nothing_is_typed(command: "Command", monkeypatch: pytest.MonkeyPatch) -> None:
    """Then help is printed, as with --help, but on stderr, and the exit code is of wrong usage."""
    monkeypatch.setattr(sys, "argv", ["oncely"])
    asked = command("--help")
    assert command() == (2, "", asked.out)
    assert asked.code == 0
    assert "\nget started:\n    init " in asked.out
    assert "\nexamples:\n    oncely init\n" in asked.out


@pytest.mark.parametrize("columns", ["20", "80", "400"])
def test_help_fits(command: "Command", monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """Lines end where the terminal does, as far as that leaves room for words."""
    monkeypatch.setenv("COLUMNS", columns)
    widest = max(map(len, command("--help").out.splitlines()))
    assert widest <= {"20": 49, "80": 78, "400": 98}[columns]


def test_version(command: "Command") -> None:
    """The package's own version, wherever it is asked for."""
    assert command("--version") == (0, f"oncely {version('oncely')}\n", "")
    assert oncely.__version__ == version("oncely")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stauts", "'stauts' is not a command of oncely; did you mean: status; see: oncely --help"),
        ("xyz", "'xyz' is not a command of oncely; see: oncely --help"),
        (
            "dead lsit",
            "'lsit' is not a command of oncely dead; did you mean: list; see: oncely dead --help",
        ),
        (
            "status --ledgr=x",
            "unrecognized arguments: --ledgr=x; did you mean: --ledger; see: oncely status --help",
        ),
        (
            "dead retry 1 --al",
            "no ledger is named; add --ledger sqlite:///ledger.db, or the like",
        ),
        (
            "consume app:consumer --lifelime=3",
            "unrecognized arguments: --lifelime=3; see: oncely consume --help",
        ),
        ("list too many", "unrecognized arguments: too many; see: oncely list --help"),
        ("--versoin", "the following arguments are required: COMMAND; see: oncely --help"),
    ],
)
def test_suggestions(
    command: "Command", monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    """What was nearly typed right is suggested, and nothing that is not like it."""
    monkeypatch.delenv("ONCELY_LEDGER", raising=False)
    assert command(*words.split()) == (2, "", f"oncely: {said}\n")


# ---- Completion --------------------------------------------------------------------------------

COMPLETED = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$(({count} - 1))
_shtab_oncely
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("oncely sta", {"status"}),
        ("oncely dead dis", {"discard"}),
        ("oncely status --le", {"--ledger"}),
        ("oncely init --store post", {"postgresql"}),
        ("oncely pipeline run pipe", {"pipeline.toml"}),
    ],
)
def test_completion(
    command: "Command",
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: "Path",
    words: str,
    offered: set[str],
) -> None:
    """Bash completes commands, actions, options, their values and files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.toml").touch()
    (tmp_path / "script").write_text(command("completion", "bash").out)
    program = COMPLETED.format(script="./script", words=words, count=len(words.split()))
    ran = subprocess.run(
        ["bash", "-c", program], capture_output=True, check=True, text=True, timeout=60
    )
    assert set(ran.stdout.split()) == offered


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef oncely"), ("fish", "complete -c")])
def test_other_shells(command: "Command", tmp_path: "Path", shell: str, line: str) -> None:
    """Scripts for the others name each command, and are such as that shell can read."""
    script = command("completion", shell).out
    assert line in script
    assert all(name in script for names in GROUPS.values() for name in names)
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=60)


def test_unknown_shell(command: "Command") -> None:
    """A shell that there is no script for is told with those that there are."""
    code, out, err = command("completion", "csh")
    assert (code, out) == (2, "")
    assert "invalid choice: 'csh' (choose from 'bash', 'zsh', 'fish')" in err
