"""Options that many commands share; a bundle of them is one argument of the command's function."""

import getpass
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypedDict, TypeVar

import click

from oncely import ops
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


class RunOptions(NamedTuple):
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


def command(
    name: str, example: str, group: click.Group | None = None
) -> Callable[[Command], click.Command]:
    """A command, of a group or by itself; the `example` stands in its help and in the reference."""
    make = click.command if group is None else group.command
    return make(name, epilog=f"\b\n{EXAMPLE}{example}")


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


def option(
    name: str,
    kind: str | Sequence[str] | click.ParamType[Any],
    text: str,
    *param: str,
    **settings: Any,
) -> Option[Any]:
    """An option whose `kind` is a type, the choices, or what stands for any text in the help."""
    match kind:
        case str():
            settings["metavar"] = kind
        case click.ParamType():
            settings["type"] = kind
        case _:
            settings["type"] = click.Choice(kind)
    return click.option(name, *param, help=text, **settings)


def flag(name: str, text: str, *param: str) -> Option[Any]:
    """An option without a value."""
    return click.option(name, *param, is_flag=True, help=text)


_ID_HELP = "the message id; write -- before an id that begins with a dash"

json_output = flag("--json", "one JSON object on stdout", "as_json")
message_id = click.argument("message_id", metavar="ID", type=values.MESSAGE_ID, help=_ID_HELP)
optional_message_id = click.argument(
    "message_id", metavar="[ID]", required=False, type=values.MESSAGE_ID, help=_ID_HELP
)
yes = flag("--yes", "do not ask before many are changed")
sure = flag("--yes", "also if the worker seems to be alive", "is_sure")
table = option("--table", "NAME", "the ledger's table", default=TABLE_NAME)
schema = option("--schema", "NAME", "the table's schema  [default: the database's]")


def consumer(text: str = "of this consumer only") -> Option[Any]:
    """--consumer."""
    return option("--consumer", values.CONSUMER, text)


def limit(default: int = 100, text: str = "how many at most") -> Option[Any]:
    """--limit."""
    return option("--limit", values.NUMBER, text, default=default)


def time(name: str, text: str, **settings: Any) -> Option[Any]:
    """An option for a length of time."""
    return option(name, values.TIME, f"{text}, such as 12h or 30d", **settings)


def url(name: str, param: str, example: str, variable: str) -> Option[Any]:
    """A URL, which may also come from the environment."""
    text = f"such as {example}, env:NAME or file:PATH"
    return option(name, "URL", text, param, envvar=variable, show_envvar=True)


# ---- Bundles -------------------------------------------------------------------------------------

_ledger_name = bundle(
    "at", LedgerName, url("--ledger", "url", "sqlite:///ledger.db", "ONCELY_LEDGER"), table, schema
)


def ledger(command: Command) -> Command:
    """--ledger, --table and --schema as `at`, a LedgerName; --json as `as_json`."""
    return bundled(command, json_output, _ledger_name)


def open_ledger(command: Command) -> Command:
    """As `ledger`, opened as `ledger` while the command runs."""

    @wraps(command)
    def run(at: LedgerName, **typed: Any) -> int | None:
        from oncely.cli.opening import opened

        with opened(at) as found:
            return command(ledger=found, **typed)

    return ledger(run)


def _note(why: str | None, by: str | None) -> Note:
    try:
        return Note(by=by or getpass.getuser(), why=why or "")
    except (KeyError, OSError):
        # A container may run under a user id that has no name.
        return Note(by=str(os.getuid()), why=why or "")


note = bundle(
    "note",
    _note,
    option("--why", "TEXT", "the reason, which is logged with the change"),
    option("--by", "NAME", "who makes the change  [default: your login name]"),
)


def _running(
    log_level: str, log_format: str, metrics_port: int | None, metrics_host: str
) -> RunOptions:
    click.get_current_context().obj.is_json = log_format == "json"
    return RunOptions(log_level, log_format, metrics_port, metrics_host)


running = bundle(
    "running",
    _running,
    option(
        "--log-level",
        ("debug", "info", "warning", "error"),
        "the lowest level that is logged on stderr",
        default="info",
    ),
    option(
        "--log-format",
        ("text", "json"),
        "a line for people, or a JSON object, for each event",
        default="text",
    ),
    option(
        "--metrics-port",
        values.port(9464),
        "serve /metrics, /live and /ready on this port; 0: any free port, which is logged",
    ),
    option(
        "--metrics-host",
        "HOST",
        "the address of that port; 0.0.0.0: all interfaces",
        default="127.0.0.1",
    ),
)


def filters(states: Iterable[str]) -> Callable[[Command], Command]:
    """--state (one of these), --consumer, --older-than and --id-contains as `filters`, which is
    an ops.Selection.
    """
    words = [*states]
    text = "only message ids with this text in them"
    return bundle(
        "filters",
        lambda state, consumer, older_than, text: ops.Selection(
            consumer=consumer,
            states=() if state is None else (state,),
            older_than=older_than,
            text=text,
        ),
        option("--state", values.state(words), ", ".join(words)),
        consumer(),
        time("--older-than", "last seen longer ago than this"),
        option("--id-contains", values.TEXT, text, "text"),
    )


_PAST_HELP = (
    f"last seen longer ago, instead of each consumer's own retention (else {Policy().retention})"
)


def retention(command: Command) -> Command:
    """--older-than, --consumer and --retention, as `ops.retentions` takes them."""
    return bundled(
        command,
        time("--older-than", _PAST_HELP),
        consumer(),
        option(
            "--retention",
            values.RETENTION,
            "for this consumer, instead of --older-than; may be repeated",
            multiple=True,
            callback=lambda _, __, pairs: dict(pairs),
        ),
    )
