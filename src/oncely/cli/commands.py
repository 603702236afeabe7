"""All commands, by sections. Their modules import what a command works with when it runs."""

import os
from collections.abc import Mapping, Sequence

import click
from click.exceptions import Exit, NoArgsIsHelpError
from click.shell_completion import get_completion_class

from oncely.cli import options
from oncely.cli.changes import discard, erase, forget, retry, settle, worker
from oncely.cli.consume import consume
from oncely.cli.dead import dead
from oncely.cli.demo import demo
from oncely.cli.init_command import init
from oncely.cli.moving import bridge, relay
from oncely.cli.options import Commands
from oncely.cli.outbox import outbox, queue, waiting
from oncely.cli.pipeline import pipeline
from oncely.cli.records import list_records, show
from oncely.cli.status import activity, audit, runs, status, workers
from oncely.cli.upkeep import archive, check, migrate, purge
from oncely.cli.web import report, web
from oncely.core.errors import ConfigError

COMPLETE_VARIABLE = "_ONCELY_COMPLETE"
"""Set by the script when it asks for completions."""


@options.command("completion", "oncely completion bash > ~/.oncely-completion")
@click.argument(
    "shell", type=click.Choice(("bash", "zsh", "fish")), metavar="SHELL", help="bash, zsh, fish"
)
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script with which a shell completes commands and options."""
    found = get_completion_class(shell)
    assert found is not None  # noqa: S101 - click has all that are offered.
    print(found(ctx.find_root().command, {}, "oncely", COMPLETE_VARIABLE).source())


SECTIONS: Mapping[str, Sequence[click.Command]] = {
    "Get started": (demo, init, migrate, completion),
    "Run": (consume, relay, bridge, pipeline),
    "Inspect": (
        *(status, activity, workers, list_records, show),
        *(waiting, queue, runs, audit, web, report),
    ),
    "Change": (settle, retry, discard, dead, outbox, forget, erase, worker),
    "Maintain": (check, purge, archive),
}
_EXAMPLES: Mapping[str, str] = {
    "oncely demo": "see a worker killed, and decide",
    "oncely init": "write a first program that runs",
    "oncely consume app:consumer --drain": "handle the messages of a queue, then end",
    "oncely list --state failed --consumer billing": "list failed messages",
}


class _Overview(Commands):
    """The command line as a whole."""

    def sections(self) -> Mapping[str, Sequence[click.Command]]:
        """As above."""
        return SECTIONS

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example, text in _EXAMPLES.items():
                formatter.write(f"  {example}\n      {text}\n")
        super().format_epilog(ctx, formatter)


@click.group(
    cls=_Overview,
    commands=[each for section in SECTIONS.values() for each in section],
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
    epilog="Options of a command: oncely COMMAND --help",
)
@click.version_option(package_name="oncely", message="oncely %(version)s")
def oncely() -> None:
    """Process every message once, over one ledger."""


# The older name of the command, which stays.
oncely.add_command(retry, "reset")
_FORMER_NAMES = {"run-now": "retry", "cancel": "discard", "send-again": "retry"}
"""Commands as they were once named, and the names that they have."""


def run(arguments: Sequence[str], obj: object = None) -> int:
    """Run a command and return its exit code; `obj` is the object of its click.Context.

    Raises ConfigError for wrong usage.
    """
    if COMPLETE_VARIABLE in os.environ:
        return int(oncely.main(prog_name="oncely", standalone_mode=False) or 0)
    try:
        with oncely.make_context("oncely", [*arguments], obj=obj) as context:
            return int(oncely.invoke(context) or 0)
    except Exit as end:
        return end.exit_code
    except NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        raise ConfigError(_in_words(error, _path(arguments))) from error


def _path(arguments: Sequence[str]) -> str:
    """The command that was typed: for some errors click does not say."""
    path = "oncely"
    command: click.Command = oncely
    for word in arguments:
        if not isinstance(command, click.Group) or word not in command.commands:
            break
        path, command = f"{path} {word}", command.commands[word]
    return path


def _in_words(error: click.UsageError, path: str) -> str:
    match error:
        case click.NoSuchCommand():
            text = f"{error.command_name!r} is not a command of {path}"
            if name := _FORMER_NAMES.get(error.command_name):
                return f"{text}; it is: {path} {name}"
        case click.NoSuchOption():
            text = f"no such option: {error.option_name}"
        case _:
            text = error.format_message().rstrip(".")
            text = text[:1].lower() + text[1:]
    # The nearest command or option that there is; but not one that the help does not show.
    close = getattr(error, "possibilities", None) or []
    params = [] if error.ctx is None else error.ctx.command.params
    hidden = {name for each in params if getattr(each, "hidden", False) for name in each.opts}
    meant = next((f"; did you mean: {each}" for each in close if each not in hidden), "")
    return f"{text}{meant}; see: {path} --help"
