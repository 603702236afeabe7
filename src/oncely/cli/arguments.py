"""What can be typed: every command and option, each value checked at the door."""

import argparse
import os
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from oncely import ops
from oncely.cli import values
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError
from oncely.stores.names import TABLE_NAME

_MANY = 10_000


class _Parser(ArgumentParser):
    """Says what is wrong in one line, as every other mistake is told."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see: {self.prog} --help")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command and its options; `run` is the function for it, `extra` what it needs installed.

    Raises ConfigError for what cannot be meant.
    """
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if "ids" in parsed:
        rest = _take_ids(parsed.ids, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def _take_ids(ids: list[str], rest: list[str]) -> list[str]:
    """Add those of `rest` that are IDs; return what is not.

    argparse leaves over what stands behind an option once it has begun to fill a list.
    """
    dashes = rest.index("--") if "--" in rest else len(rest)
    unknown = [word for word in rest[:dashes] if word.startswith("-")]
    ids += [word for word in rest[:dashes] if word not in unknown]
    ids += rest[dashes + 1 :]
    return unknown


def _parser() -> ArgumentParser:
    parser = _Parser(prog="oncely", description="Process every message once, over one ledger.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_pipeline(commands)
    _add_schema(commands)
    _add_looking(commands)
    _add_changing(commands)
    _add_removing(commands)
    _add_reporting(commands)
    _add_relay(commands)
    _add_consume(commands)
    _add_dead(commands)
    return parser


def _command(commands: Any, name: str, run: str, text: str) -> ArgumentParser:
    """A command over a ledger's table."""
    command = _ledger_command(commands, name, run, text)
    command.add_argument(
        "--table", metavar="NAME", default=TABLE_NAME, help=f"of the ledger (default: {TABLE_NAME})"
    )
    command.add_argument("--schema", metavar="NAME", help="of the table (default: the database's)")
    return command


def _ledger_command(commands: Any, name: str, run: str, text: str) -> ArgumentParser:
    """A command that takes --ledger."""
    command = _plain_command(commands, name, run, text)
    _add_url(command, "--ledger", "sqlite:///ledger.db", "ONCELY_LEDGER")
    return command


def _plain_command(commands: Any, name: str, run: str, text: str) -> ArgumentParser:
    """A command that takes --json; `run` is where its function is, as module:name."""
    command: ArgumentParser = commands.add_parser(name, help=text, description=f"{text}.")
    command.set_defaults(run=f"oncely.cli.{run}", extra="cli")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return command


# ---- Commands ----------------------------------------------------------------------------------


def _add_pipeline(commands: Any) -> None:
    pipeline = commands.add_parser("pipeline", help="run a pipeline on Spark")
    actions = pipeline.add_subparsers(title="actions", required=True, metavar="ACTION")
    text = "run the pipeline that a TOML file describes; --ledger replaces the file's"
    run = _ledger_command(actions, "run", "pipeline:run", text)
    run.set_defaults(extra="spark")
    run.add_argument("file", metavar="FILE.toml")


def _add_schema(commands: Any) -> None:
    migrate = _command(commands, "migrate", "schema:migrate", "create or upgrade the schema")
    migrate.add_argument("--sql", action="store_true", help="print the SQL and change nothing")

    text = "say what can lose or repeat messages: schema, settings of the store, retention, lease"
    check = _command(commands, "check", "schema:check", text)
    _add_duration(check, "--replay-window", "how long a message may be delivered again")
    text = "how long records are kept, instead of each consumer's own"
    _add_duration(check, "--retention", text)
    _add_duration(check, "--broker-timeout", "how long the broker waits for an acknowledgement")
    text = f"a claim's time limit, or none (default: {ops.LEASE})"
    check.add_argument("--lease", metavar="TIME", type=values.lease, default=ops.LEASE, help=text)


def _add_looking(commands: Any) -> None:
    _command(commands, "status", "status:status", "count records by consumer and state")

    text = "list records, the least recently seen first"
    list_ = _command(commands, "list", "record_commands:list_records", text)
    _add_filters(list_)
    _add_number(list_, "--limit", "how many at most", 100)

    show = _command(commands, "show", "record_commands:show", "show all fields of one record")
    _add_id(show)
    _add_consumer(show)


def _add_changing(commands: Any) -> None:
    text = "allow what has failed or is in doubt to run again"
    reset = _command(commands, "reset", "changes:reset", text)
    _add_changes(reset, ops.RESETTABLE)

    text = "remove records that nobody works on; the next delivery is treated as new"
    forget = _command(commands, "forget", "changes:forget", text)
    _add_changes(forget, ops.STATES)


def _add_removing(commands: Any) -> None:
    text = "remove what was completed or failed long ago"
    purge = _command(commands, "purge", "purge:purge", text)
    _add_retention(purge)
    _add_number(purge, "--batch", "records in one transaction", 1_000)

    text = "write what was completed or failed long ago to Parquet, then remove it"
    archive = _command(commands, "archive", "archive:archive", text)
    archive.set_defaults(extra="archive")
    text = "a path, or a URI such as s3://bucket/folder"
    archive.add_argument("--to", metavar="FOLDER", required=True, help=text)
    _add_retention(archive)
    _add_number(archive, "--batch", "records held in memory at once", 50_000)


def _add_reporting(commands: Any) -> None:
    text = "compare a source of messages with what ledger and archive know of them, on Spark"
    reconcile = _ledger_command(commands, "reconcile", "reconcile_command:run", text)
    reconcile.set_defaults(extra="spark")
    text = "a pipeline's, or one with just the tables [source] and [message]"
    reconcile.add_argument("file", metavar="FILE.toml", help=text)
    _add_consumer(reconcile, "whose records are looked at, instead of the file's")
    _add_archived(reconcile)
    text = "a new folder, for the details as Parquet"
    reconcile.add_argument("--to", metavar="FOLDER", help=text)

    text = "write a page of plots of what ledger and archive know"
    report = _ledger_command(commands, "report", "report_command:run", text)
    report.set_defaults(extra="report", table=TABLE_NAME, schema=None)
    _add_consumer(report)
    _add_archived(report)
    report.add_argument("--to", metavar="FILE.html", required=True, help="replaced, if it is there")


def _add_relay(commands: Any) -> None:
    text = "send deferred messages until stopped, or until nothing more can be sent"
    relay = _command(commands, "relay", "relay:relay", text)
    _add_transport(relay)
    relay.add_argument("--drain", action="store_true", help="end when nothing more can be sent")
    _add_number(relay, "--batch", "messages that are taken together", 100)
    _add_duration(relay, "--poll", "how often to look, woken or not", "1s")
    _add_number(relay, "--tries", "before a refused message is set aside", 10)
    text = "retry set-aside messages first"
    relay.add_argument("--send-again", action="store_true", help=text)


def _add_consume(commands: Any) -> None:
    text = "run a consumer until stopped, or until its queue is empty"
    consume = _plain_command(commands, "consume", "consume:consume", text)
    consume.add_argument(
        "consumer", metavar="module:consumer", help="importable from the current folder"
    )
    _add_number(consume, "--workers", "processes, each started again when it dies", 1)
    text = "end when nothing is waiting, delayed or in flight"
    consume.add_argument("--drain", action="store_true", help=text)
    # Not from the environment: what is set there for the other commands would let a consumer
    # forget, without a word, what its own ledger knows.
    text = "instead of the module's own, such as env:NAME or file:PATH"
    consume.add_argument("--ledger", metavar="URL", help=text)
    consume.set_defaults(table=TABLE_NAME, schema=None)
    consume.add_argument("--transport", metavar="URL", help=text)
    # Between a supervisor and its workers.
    consume.add_argument("--lifeline", metavar="FD", type=int, help=argparse.SUPPRESS)


def _add_dead(commands: Any) -> None:
    dead = commands.add_parser("dead", help="look at dead letters, and let them be tried again")
    actions = dead.add_subparsers(title="actions", required=True, metavar="ACTION")
    list_ = _plain_command(actions, "list", "dead:list_letters", "list dead letters, oldest first")
    _add_queue(list_, 100)
    text = "show dead letters in full"
    show = _plain_command(actions, "show", "dead:show", text)
    _add_queue(show, _MANY)
    show.add_argument("id", metavar="ID", help="of the message")
    text = (
        "put dead letters back into their queue, as messages never delivered; "
        "in a ledger that is named, their tries begin again"
    )
    retry = _command(actions, "retry", "dead:retry", text)
    _add_queue(retry, _MANY)
    text = "of the message; one that begins with a dash stands after --"
    retry.add_argument("ids", metavar="ID", nargs="*", help=text)
    retry.add_argument("--all", action="store_true", help="all of the queue")
    _add_consumer(retry, "whose records are reset (default: the only one in the ledger)")
    _add_note(retry)


# ---- Options -----------------------------------------------------------------------------------


def _add_id(command: ArgumentParser, **how: Any) -> None:
    text = "the message id; one that begins with a dash stands after --"
    command.add_argument(
        "id", metavar="ID", type=partial(values.name, "ID", "id"), help=text, **how
    )


def _add_consumer(command: ArgumentParser, text: str = "of this consumer only") -> None:
    type_ = partial(values.name, "--consumer", "consumer")
    command.add_argument("--consumer", metavar="NAME", type=type_, help=text)


def _add_retention(command: ArgumentParser) -> None:
    """Which records are past their retention."""
    text = f"last seen longer ago than this, instead of each consumer's own (else {ops.RETENTION})"
    _add_duration(command, "--older-than", text)
    _add_consumer(command)
    command.add_argument(
        "--retention",
        metavar="CONSUMER=TIME",
        type=values.retention,
        action="append",
        default=[],
        help="for this consumer, instead of --older-than; may be repeated",
    )


def _add_transport(command: ArgumentParser) -> None:
    _add_url(command, "--transport", "sqlite:///queue.db", "ONCELY_TRANSPORT")


def _add_url(command: ArgumentParser, name: str, example: str, variable: str) -> None:
    told = f"such as {example}, env:NAME or file:PATH (default: ${variable})"
    command.add_argument(name, metavar="URL", default=os.environ.get(variable), help=told)


def _add_queue(command: ArgumentParser, limit: int) -> None:
    command.add_argument("queue", metavar="QUEUE", help="in which the messages were received")
    _add_transport(command)
    _add_number(command, "--limit", "how many dead letters are looked at", limit)


def _add_filters(command: ArgumentParser, states: Iterable[str] = ops.STATES) -> None:
    words = list(states)
    type_ = partial(values.state, words)
    command.add_argument("--state", metavar="STATE", type=type_, help=", ".join(words))
    _add_consumer(command)
    _add_duration(command, "--older-than", "last seen longer ago than this")
    type_ = partial(values.name, "--text", "text")
    command.add_argument("--text", metavar="TEXT", type=type_, help="stands in the message id")


def _add_changes(command: ArgumentParser, states: Iterable[str]) -> None:
    _add_id(command, nargs="?")
    _add_filters(command, states)
    _add_number(command, "--limit", "how many at most", _MANY)
    command.add_argument("--yes", action="store_true", help="do not ask before many are changed")
    _add_note(command)


def _add_note(command: ArgumentParser) -> None:
    command.add_argument("--why", metavar="TEXT", default="", help="noted with what is done")
    command.add_argument("--by", metavar="NAME", help="who does it (default: your login name)")


def _add_archived(command: ArgumentParser) -> None:
    text = "a folder that oncely archive has written; its records are looked at as well"
    command.add_argument("--archive", metavar="FOLDER", help=text)


def _add_duration(
    command: ArgumentParser, name: str, text: str, default: Duration | None = None
) -> None:
    told = f"{text}, such as 12h or 30d" if default is None else f"{text} (default: {default})"
    command.add_argument(
        name, metavar="TIME", type=partial(values.duration, name), default=default, help=told
    )


def _add_number(command: ArgumentParser, name: str, text: str, default: int) -> None:
    told = f"{text} (default: {default})"
    command.add_argument(
        name, metavar="N", type=partial(values.number, name), default=default, help=told
    )
