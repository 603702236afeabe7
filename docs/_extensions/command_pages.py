"""Sphinx extension: a page with the line `[commands]` has every command, made from the commands."""

import inspect
import re
from collections.abc import Iterator

import click
from sphinx.application import Sphinx

from oncely.cli import commands
from oncely.cli.options import EXAMPLE

_PLACE = "[commands]"
_MARKUP = re.compile(r"([\\`*_|<>\[\]])")


def _insert(app: Sphinx, _: str, source: list[str]) -> None:
    if f"\n{_PLACE}\n" in source[0]:
        app.env.note_dependency(inspect.getfile(commands))
        source[0] = source[0].replace(_PLACE, "\n".join(_lines()))


def _lines() -> Iterator[str]:
    root = click.Context(commands.oncely, info_name="oncely", show_default=True)
    for title, section in commands.SECTIONS.items():
        yield from (f"## {title}", "")
        for command in section:
            yield from _command(_within(command, root), "###")


def _within(command: click.Command, parent: click.Context) -> click.Context:
    return click.Context(command, info_name=command.name, parent=parent)


def _command(context: click.Context, level: str) -> Iterator[str]:
    command = context.command
    yield from (f"{level} {context.command_path}", "", _plain(inspect.cleandoc(command.help or "")))
    yield ""
    if isinstance(command, click.Group):
        for action in command.commands.values():
            yield from _command(_within(action, context), f"{level}#")
        return
    yield from ("```sh", (command.epilog or "").partition(EXAMPLE)[2], "```", "")
    yield from ("| argument | meaning |", "|---|---|")
    for param in command.params:
        record = param.get_help_record(context)
        if record is not None:
            typed, text = record
            typed = typed.replace("|", r"\|")
            yield f"| `{typed}` | {_plain(' '.join(text.split()))} |"
    yield ""


def _plain(text: str) -> str:
    """A text as Markdown that shows it as it is."""
    return _MARKUP.sub(r"\\\1", text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _insert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
