"""Sphinx extension: a page with the line `[commands]` has every command, made from the parser."""

import argparse
import inspect
import re
from collections.abc import Iterator

from sphinx.application import Sphinx

from oncely.cli import arguments
from oncely.cli.examples import EXAMPLES
from oncely.cli.overview import GROUPS
from oncely.cli.parsers import CommandParser

_PLACE = "[commands]"
_MARKUP = re.compile(r"([\\`*_|<>\[\]])")


def _insert(app: Sphinx, _: str, source: list[str]) -> None:
    if f"\n{_PLACE}\n" in source[0]:
        app.env.note_dependency(inspect.getfile(arguments))
        source[0] = source[0].replace(_PLACE, "\n".join(_lines()))


def _lines() -> Iterator[str]:
    commands = arguments.command_parser().subcommands
    for title, names in GROUPS.items():
        yield from (f"## {title.capitalize()}", "")
        for name in names:
            yield from _command(commands[name], "###")


def _command(parser: CommandParser, level: str) -> Iterator[str]:
    text = _plain(parser.description or "")
    yield from (f"{level} {parser.prog}", "", text[:1].upper() + text[1:], "")
    for action in parser.subcommands.values():
        yield from _command(action, f"{level}#")
    if parser.subcommands:
        return
    yield from ("```sh", EXAMPLES[parser.prog], "```", "")
    shown = [each for each in parser.arguments if each.help != argparse.SUPPRESS]
    yield from ("| argument | meaning |", "|---|---|")
    # Those without dashes first, as they are typed.
    for each in sorted(shown, key=lambda action: bool(action.option_strings)):
        if each.dest != "help":
            yield f"| {_name(each)} | {_plain(each.help or '')}{_need(each)} |"
    yield ""


def _name(action: argparse.Action) -> str:
    """What is typed, as code."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    is_optional = action.nargs in ("?", "*")
    value = f"[{value}]" if value and is_optional else str(value)
    typed = " ".join(filter(None, ["/".join(action.option_strings), value]))
    return f"`{typed}`".replace("|", r"\|")


def _need(action: argparse.Action) -> str:
    return " (required)" if action.option_strings and action.required else ""


def _plain(text: str) -> str:
    """A text as Markdown that shows it as it is."""
    return _MARKUP.sub(r"\\\1", text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _insert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
