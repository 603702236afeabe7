"""The command line as a whole: what `oncely` and `oncely --help` show."""

import argparse
import shutil
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import oncely
from oncely.cli.parsers import CommandParser

_COLUMN, _MOST_COLUMNS = 16, 100
GROUPS: Mapping[str, Sequence[str]] = {
    "get started": ("init", "migrate", "completion"),
    "run": ("consume", "relay", "pipeline"),
    "inspect": (
        *("status", "activity", "workers", "list", "show"),
        *("waiting", "queue", "runs", "audit", "web", "report", "reconcile"),
    ),
    "change": (
        *("dead", "outbox", "settle", "reset"),
        *("run-now", "cancel", "forget", "bindings"),
    ),
    "maintain": ("check", "purge", "archive"),
}
_EXAMPLES: Mapping[str, str] = {
    "oncely init": "write a first program that runs",
    "oncely consume app:consumer --drain": "handle the messages of a queue, then end",
    "oncely list --state failed --consumer billing": "list failed messages",
}


class OverviewParser(CommandParser):
    """The parser of the whole command line; its help shows the commands by groups."""

    def __init__(self) -> None:
        super().__init__(prog="oncely", description="Process every message once, over one ledger.")
        self.add_argument("--version", action=_Version, help="show the version and exit")

    def format_help(self) -> str:
        """The text of --help."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"usage: {self.prog} COMMAND ..."
        yield from ("", self.description or "")
        for title, names in GROUPS.items():
            yield from ("", f"{title}:")
            for name in names:
                text = (self.subcommands[name].description or "").removesuffix(".")
                yield from _row(name, text)
        yield from ("", "options:")
        for option in self.arguments:
            yield from _row(", ".join(option.option_strings), option.help or "")
        yield from ("", "examples:")
        for command, text in _EXAMPLES.items():
            yield from (f"    {command}", f"        {text}")
        yield from ("", f"options of a command: {self.prog} COMMAND --help")


class _Version(argparse.Action):
    """Prints the version; it is looked up only if asked for."""

    def __init__(self, **how: Any) -> None:
        super().__init__(nargs=0, **how)

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        print(f"oncely {oncely.__version__}")
        parser.exit()


def _row(name: str, text: str) -> list[str]:
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS) - 2
    first = f"    {name}".ljust(_COLUMN - 1) + " "
    return textwrap.wrap(
        text,
        max(columns, 2 * _COLUMN),
        initial_indent=first,
        subsequent_indent=" " * _COLUMN,
        break_on_hyphens=False,
    )
