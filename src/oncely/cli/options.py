"""Options that many commands share; a bundle of them is one argument of the command's function."""

import getpass
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypedDict, TypeVar

import click

from oncely.cli import values
from oncely.core.policy import Policy
from oncely.stores.names import TABLE_NAME

MANY = 10_000
EXAMPLE = "Example: "

F = TypeVar("F", bound=Callable[..., Any])
Command = Callable[..., int | None]
Option = Callable[[F], F]


class LedgerName(NamedTuple):
    """Which ledger to open."""

    url: str | None
    table: str
    schema: str | None


class Note(TypedDict):
    """Who makes a change, and why."""

    by: str
    why: str


class Past(TypedDict):
    """Which records are past their retention."""

    older_than: str | None
    consumer: str | None
    retention: Mapping[str, str]


class Filters(TypedDict):
    """Which records are meant: the arguments of ops.Selection."""

    consumer: str | None
    states: tuple[str, ...]
    older_than: str | None
    text: str | None


class Running(NamedTuple):
    """The log and the monitoring port of a command that runs for long."""

    log_level: str = "info"
    log_format: str = "text"
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"


class Commands(click.Group):
    """A command with several actions, each of which its help tells in full."""

    def sections(self) -> Mapping[str, Sequence[click.Command]]:
        """The commands by titles."""
        return {"Commands": [*self.commands.values()]}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write all sections."""
        width = max(len(name) for name in self.commands)
        for title, commands in self.sections().items():
            rows = [(f"{each.name:<{width}}", each.get_short_help_str(1_000)) for each in commands]
            with formatter.section(title):
                formatter.write_dl(rows)


def example(text: str) -> str:
    """The epilog of a command; the reference has the example, too."""
    return f"\b\n{EXAMPLE}{text}"


def bundled(command: Command, *decorators: Option[Any]) -> Command:
    """The function with these options, in this order."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def bundle(
    name: str, make: Callable[..., Any], *decorators: Option[Any]
) -> Callable[[Command], Command]:
    """Options that become one argument of the function: what `make` makes of their values, which
    have the names of its parameters.
    """
    own = [*signature(make).parameters]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**typed: Any) -> int | None:
            made = make(**{each: typed.pop(each) for each in own})
            return command(**{name: made}, **typed)

        return bundled(run, *decorators)

    return decorate


# ---- Single options ------------------------------------------------------------------------------

_ID_HELP = "the message id; write -- before an id that begins with a dash"

json_output = click.option("--json", "as_json", is_flag=True, help="one JSON object on stdout")
message_id = click.argument("message_id", metavar="ID", type=values.MESSAGE_ID, help=_ID_HELP)
optional_message_id = click.argument(
    "message_id", metavar="[ID]", required=False, type=values.MESSAGE_ID, help=_ID_HELP
)
yes = click.option("--yes", is_flag=True, help="do not ask before many are changed")
table = click.option("--table", metavar="NAME", default=TABLE_NAME, help="the ledger's table")
schema = click.option(
    "--schema", metavar="NAME", help="the table's schema  [default: the database's]"
)


def consumer(text: str = "of this consumer only") -> Option[Any]:
    """--consumer."""
    return click.option("--consumer", type=values.CONSUMER, help=text)


def limit(default: int = 100, text: str = "how many at most") -> Option[Any]:
    """--limit."""
    return click.option("--limit", type=values.NUMBER, default=default, help=text)


def time(name: str, text: str) -> Option[Any]:
    """An option for a length of time."""
    return click.option(name, type=values.TIME, help=f"{text}, such as 12h or 30d")


def url(name: str, param: str, example: str, variable: str) -> Option[Any]:
    """A URL, which may also come from the environment."""
    text = f"such as {example}, env:NAME or file:PATH"
    return click.option(name, param, metavar="URL", envvar=variable, show_envvar=True, help=text)


# ---- Bundles -------------------------------------------------------------------------------------

_ledger_name = bundle(
    "at", LedgerName, url("--ledger", "url", "sqlite:///ledger.db", "ONCELY_LEDGER"), table, schema
)


def ledger(command: Command) -> Command:
    """--ledger, --table and --schema as `at`, a LedgerName; --json as `as_json`."""
    return bundled(command, json_output, _ledger_name)


def _note(why: str | None, by: str | None) -> Note:
    return Note(by=by or _login_name(), why=why or "")


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id that has no name.
        return str(os.getuid())


note = bundle(
    "note",
    _note,
    click.option("--why", metavar="TEXT", help="the reason, which is logged with the change"),
    click.option("--by", metavar="NAME", help="who makes the change  [default: your login name]"),
)


def _running(
    log_level: str, log_format: str, metrics_port: int | None, metrics_host: str
) -> Running:
    click.get_current_context().obj.is_json = log_format == "json"
    return Running(log_level, log_format, metrics_port, metrics_host)


running = bundle(
    "running",
    _running,
    click.option(
        "--log-level",
        type=click.Choice(("debug", "info", "warning", "error")),
        default="info",
        help="the lowest level that is logged on stderr",
    ),
    click.option(
        "--log-format",
        type=click.Choice(("text", "json")),
        default="text",
        help="a line for people, or a JSON object, for each event",
    ),
    click.option(
        "--metrics-port",
        type=values.port(9464),
        help="serve /metrics, /live and /ready on this port; 0: any free port, which is logged",
    ),
    click.option(
        "--metrics-host",
        metavar="HOST",
        default="127.0.0.1",
        help="the address of that port; 0.0.0.0: all interfaces",
    ),
)


def _filters(
    state: str | None, consumer: str | None, older_than: str | None, text: str | None
) -> Filters:
    states = () if state is None else (state,)
    return Filters(consumer=consumer, states=states, older_than=older_than, text=text)


def filters(states: Iterable[str]) -> Callable[[Command], Command]:
    """--state (one of these), --consumer, --older-than and --id-contains as `filters`."""
    words = [*states]
    text = "only message ids with this text in them"
    return bundle(
        "filters",
        _filters,
        click.option("--state", type=values.state(words), help=", ".join(words)),
        consumer(),
        time("--older-than", "last seen longer ago than this"),
        click.option("--id-contains", "text", type=values.TEXT, help=text),
    )


def _past(
    older_than: str | None, consumer: str | None, retention: Iterable[tuple[str, str]]
) -> Past:
    return Past(older_than=older_than, consumer=consumer, retention=dict(retention))


_PAST_HELP = (
    f"last seen longer ago, instead of each consumer's own retention (else {Policy().retention})"
)
retention = bundle(
    "past",
    _past,
    time("--older-than", _PAST_HELP),
    consumer(),
    click.option(
        "--retention",
        type=values.RETENTION,
        multiple=True,
        help="for this consumer, instead of --older-than; may be repeated",
    ),
)
