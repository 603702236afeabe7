"""What the command says of itself: help by groups, versions, suggestions, completion in shells."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.cli.conftest import Command

import oncely
from oncely.cli import main
from oncely.cli.commands import SECTIONS
from oncely.cli.commands import oncely as program


def test_sections() -> None:
    """Every command is in one section, but for the older name of one."""
    shown = [command.name for commands in SECTIONS.values() for command in commands]
    assert sorted([*map(str, shown), "reset"]) == sorted(program.commands)
    assert program.commands["reset"] is program.commands["retry"]


def test_nothing_is_typed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then help is printed, as with --help, but on stderr, and the exit code is of wrong usage."""
    monkeypatch.setattr(sys, "argv", ["oncely"])
    asked = command("--help")
    assert command() == (2, "", asked.out)
    assert asked.code == 0
    assert "\nGet started:\n  demo " in asked.out
    assert "\nExamples:\n  oncely demo\n" in asked.out


@pytest.mark.parametrize("columns", ["20", "80", "400"])
def test_help_fits(command: Command, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """Lines end where the terminal does, as far as that leaves room for words."""
    monkeypatch.setenv("COLUMNS", columns)
    widest = max(map(len, command("--help").out.splitlines()))
    assert widest <= {"20": 50, "80": 78, "400": 98}[columns]


def test_version(command: Command) -> None:
    """The package's own version, wherever it is asked for."""
    assert command("--version") == (0, f"oncely {version('oncely')}\n", "")
    assert oncely.__version__ == version("oncely")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stauts", "'stauts' is not a command of oncely; did you mean: status; see: oncely --help"),
        ("run-now 7", "'run-now' is not a command of oncely; it is: oncely retry"),
        (
            "outbox send-again 7",
            "'send-again' is not a command of oncely outbox; it is: oncely outbox retry",
        ),
        ("xyz", "'xyz' is not a command of oncely; see: oncely --help"),
        (
            "dead lsit",
            "'lsit' is not a command of oncely dead; did you mean: list; see: oncely dead --help",
        ),
        (
            "status --ledgr=x",
            "no such option: --ledgr; did you mean: --ledger; see: oncely status --help",
        ),
        (
            "dead retry 1 --al",
            "no such option: --al; did you mean: --all; see: oncely dead retry --help",
        ),
        (
            "consume app:consumer --lifelime=3",
            "no such option: --lifelime; see: oncely consume --help",
        ),
        ("list too many", "got unexpected extra arguments (too many); see: oncely list --help"),
        ("--versoin", "no such option: --versoin; did you mean: --version; see: oncely --help"),
    ],
)
def test_suggestions(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    """What was nearly typed right is suggested, and nothing that is not like it."""
    monkeypatch.delenv("ONCELY_LEDGER", raising=False)
    assert command(*words.split()) == (2, "", f"oncely: {said}\n")


# ---- Completion --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("oncely sta", "plain,status"),
        ("oncely dead dis", "plain,discard"),
        ("oncely status --le", "plain,--ledger"),
        ("oncely init --store post", "plain,postgresql"),
        ("oncely consume app:consumer --life", ""),
        ("oncely pipeline run pipe", "file,"),
        ("oncely report --to re", "file,"),
        ("oncely init in", "dir,"),
        ("oncely archive --to ou", "dir,"),
    ],
)
def test_completion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, offered: str
) -> None:
    """Commands, actions, options and their values; files and folders are left to the shell."""
    monkeypatch.setenv("_ONCELY_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        main([])
    out = capsys.readouterr().out
    assert out.startswith(offered) if offered else out.strip() == ""


COMPLETED = """
source {script}
compopt() {{ :; }}
COMP_WORDS=(oncely dead dis)
COMP_CWORD=2
_oncely_completion oncely
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_completion_in_bash(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script that is printed asks the program."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "script").write_text(command("completion", "bash").out)
    program = COMPLETED.format(script=tmp_path / "script")
    ran = subprocess.run(
        ["bash", "-c", program], capture_output=True, check=True, text=True, timeout=60
    )
    assert ran.stdout.split() == ["discard"]


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef oncely"), ("fish", "complete ")])
def test_other_shells(command: Command, tmp_path: Path, shell: str, line: str) -> None:
    """Scripts for the others are such as that shell can read."""
    script = command("completion", shell).out
    assert line in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=60)


def test_unknown_shell(command: Command) -> None:
    """A shell that there is no script for is told with those that there are."""
    code, out, err = command("completion", "csh")
    assert (code, out) == (2, "")
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in err
