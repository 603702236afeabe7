"""`oncely completion`: the script with which a shell completes commands and options."""

import argparse

import shtab

from oncely.cli.arguments import command_parser
from oncely.cli.parsers import CommandParser


def completion(parsed: argparse.Namespace) -> int:
    """Print the script for a shell."""
    parser = command_parser()
    _complete_files(parser)
    print(shtab.complete(parser, parsed.shell))
    return 0


def _complete_files(parser: CommandParser) -> None:
    """Let shells offer files and folders as the values of options that take one."""
    for argument in parser.arguments:
        name = argument.metavar if isinstance(argument.metavar, str) else ""
        if name.partition(".")[0] == "FILE":
            argument.complete = shtab.FILE  # type: ignore[attr-defined]
        elif name == "FOLDER":
            argument.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    for command in parser.subcommands.values():
        _complete_files(command)
