"""Options that many commands share; a bundle of them is one argument of the command's function."""

import getpass
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
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


class Filters(TypedDict):
    """Which records are meant."""

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


def bundled(run: Command, *options: Option[Any]) -> Command:
    """The function with these options, in this order."""
    for option in reversed(options):
        run = option(run)
    return run


# ---- Single options ------------------------------------------------------------------------------

json_option = click.option("--json", "as_json", is_flag=True, help="one JSON object on stdout")
_ID_HELP = "the message id; write -- before an id that begins with a dash"
id_argument = click.argument("message_id", metavar="ID", type=values.MESSAGE_ID, help=_ID_HELP)
optional_id_argument = click.argument(
    "message_id", metavar="[ID]", required=False, type=values.MESSAGE_ID, help=_ID_HELP
)
yes_option = click.option("--yes", is_flag=True, help="do not ask before many are changed")
table_option = click.option(
    "--table", metavar="NAME", default=TABLE_NAME, help="the ledger's table"
)
schema_option = click.option(
    "--schema", metavar="NAME", help="the table's schema  [default: the database's]"
)


def consumer_option(text: str = "of this consumer only") -> Option[Any]:
    """--consumer."""
    return click.option("--consumer", type=values.CONSUMER, help=text)


def limit_option(default: int = 100, text: str = "how many at most") -> Option[Any]:
    """--limit."""
    return click.option("--limit", type=values.NUMBER, default=default, help=text)


def time_option(name: str, text: str) -> Option[Any]:
    """An option for a length of time."""
    return click.option(name, type=values.TIME, help=f"{text}, such as 12h or 30d")


def url_option(name: str, example: str, variable: str) -> Option[Any]:
    """A URL, which may also come from the environment."""
    text = f"such as {example}, env:NAME or file:PATH"
    return click.option(name, metavar="URL", envvar=variable, show_envvar=True, help=text)


# ---- Bundles -------------------------------------------------------------------------------------


def ledger_options(command: Command) -> Command:
    """--ledger, --table and --schema as `at`; --json as `as_json`."""

    @wraps(command)
    def run(*, ledger: str | None, table: str, schema: str | None, **others: Any) -> int | None:
        return command(at=LedgerName(ledger, table, schema), **others)

    ledger = url_option("--ledger", "sqlite:///ledger.db", "ONCELY_LEDGER")
    return bundled(run, json_option, ledger, table_option, schema_option)


def note_options(command: Command) -> Command:
    """--why and --by as `note`."""

    @wraps(command)
    def run(*, why: str | None, by: str | None, **others: Any) -> int | None:
        return command(note=Note(by=by or _login_name(), why=why or ""), **others)

    return bundled(
        run,
        click.option("--why", metavar="TEXT", help="the reason, which is logged with the change"),
        click.option(
            "--by", metavar="NAME", help="who makes the change  [default: your login name]"
        ),
    )


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id that has no name.
        return str(os.getuid())


def running_options(command: Command) -> Command:
    """--log-level, --log-format, --metrics-port and --metrics-host as `running`."""

    @wraps(command)
    def run(
        *,
        log_level: str,
        log_format: str,
        metrics_port: int | None,
        metrics_host: str,
        **others: Any,
    ) -> int | None:
        click.get_current_context().obj.is_json = log_format == "json"
        running = Running(log_level, log_format, metrics_port, metrics_host)
        return command(running=running, **others)

    return bundled(
        run,
        click.option(
            "--log-level",
            type=click.Choice(("debug", "info", "warning", "error")),
            default=Running().log_level,
            help="the lowest level that is logged on stderr",
        ),
        click.option(
            "--log-format",
            type=click.Choice(("text", "json")),
            default=Running().log_format,
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
            default=Running().metrics_host,
            help="the address of that port; 0.0.0.0: all interfaces",
        ),
    )


def filter_options(states: Iterable[str]) -> Callable[[Command], Command]:
    """--state (one of these), --consumer, --older-than and --id-contains as `filters`: the keyword
    arguments of ops.Selection.
    """
    words = [*states]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(
            *,
            state: str | None,
            consumer: str | None,
            older_than: str | None,
            text: str | None,
            **others: Any,
        ) -> int | None:
            filters = Filters(
                consumer=consumer,
                states=() if state is None else (state,),
                older_than=older_than,
                text=text,
            )
            return command(filters=filters, **others)

        text = "only message ids with this text in them"
        return bundled(
            run,
            click.option("--state", type=values.state(words), help=", ".join(words)),
            consumer_option(),
            time_option("--older-than", "last seen longer ago than this"),
            click.option("--id-contains", "text", type=values.TEXT, help=text),
        )

    return decorate


def retention_options(command: Command) -> Command:
    """--older-than, --consumer and --retention: which records are past their retention."""
    return bundled(
        command,
        time_option(
            "--older-than",
            f"last seen longer ago, instead of each consumer's own retention (else "
            f"{Policy().retention})",
        ),
        consumer_option(),
        click.option(
            "--retention",
            type=values.RETENTION,
            multiple=True,
            help="for this consumer, instead of --older-than; may be repeated",
        ),
    )
