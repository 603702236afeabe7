"""The commands of the command line, and how one that was typed is read, without running it."""

from collections.abc import Iterator, Sequence

import click

from oncely.cli.commands import oncely


def every_command(
    group: click.Group = oncely, path: str = "oncely"
) -> Iterator[tuple[str, click.Command]]:
    """Those that do something, by their full names; not by the older name of one."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, f"{path} {name}")
        elif name == command.name:
            yield f"{path} {name}", command


def typed(words: Sequence[str]) -> click.Context:
    """The command with its parameters; raises what a wrong word raises."""
    command: click.Command = oncely
    path, *rest = "oncely", *words
    while isinstance(command, click.Group):
        name, *rest = rest
        path, command = f"{path} {name}", command.commands[name]
    return command.make_context(path, rest)
