"""Argument parsers whose errors suggest what the user may have meant."""

import argparse
import re
from argparse import Action, ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from oncely.core.errors import ConfigError

_UNKNOWN = re.compile(r"argument (?:COMMAND|ACTION): invalid choice: '(?P<typed>[^']*)'")


class CommandParser(ArgumentParser):
    """Reports what is wrong in one line, as for every other error."""

    def __init__(self, **how: Any) -> None:
        self.arguments: list[Action] = []
        self.subcommands: Mapping[str, CommandParser] = {}
        super().__init__(**how)

    def add_argument(self, *names: Any, **how: Any) -> Action:
        """As argparse does; the argument is also added to `arguments`."""
        action = super().add_argument(*names, **how)
        self.arguments.append(action)
        return action

    def add_commands(self, title: str, metavar: str) -> Any:
        """The object to which commands are added; the user must type one of them."""
        commands = self.add_subparsers(
            title=title, required=True, metavar=metavar, parser_class=CommandParser
        )
        self.subcommands = commands.choices
        return commands

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError; for an unknown command, with the nearest known one."""
        unknown = _UNKNOWN.search(message)
        if unknown is not None:
            typed = unknown["typed"]
            message = f"{typed!r} is not a command of {self.prog}{_meant(typed, self.subcommands)}"
        raise ConfigError(f"{message}; see: {self.prog} --help")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Raise ConfigError for unknown arguments."""
        shown = [action for action in self.arguments if action.help != argparse.SUPPRESS]
        options = [option for action in shown for option in action.option_strings]
        typed = [word.partition("=")[0] for word in words if word.startswith("-")]
        close = _meant(typed[0], options) if typed else ""
        self.error(f"unrecognized arguments: {' '.join(words)}{close}")


def _meant(typed: str, words: Iterable[str]) -> str:
    close = get_close_matches(typed, list(words), n=1)
    return f"; did you mean: {close[0]}" if close else ""
