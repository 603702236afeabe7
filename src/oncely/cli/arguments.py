"""What can be typed: every command and option, each value checked at the door."""

import argparse
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from oncely import ops
from oncely.cli import values
from oncely.cli.examples import EXAMPLES
from oncely.cli.logs import FORMATS, LEVELS
from oncely.cli.overview import OverviewParser
from oncely.cli.parsers import CommandParser
from oncely.cli.starters import STARTERS, STORES
from oncely.core.durations import Duration
from oncely.stores.names import TABLE_NAME

_MANY = 10_000
_SHELLS = ("bash", "zsh", "fish")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command and its options; `run` is the function for it, `extra` what it needs installed.

    Raises ConfigError for what cannot be meant. Where nothing is typed, help is printed, and
    SystemExit raised, as after --help.
    """
    parser = command_parser()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    parsed, rest = parser.parse_known_args(words)
    if "ids" in parsed:
        rest = _take_ids(parsed.ids, rest)
    if rest:
        parsed.parser.refuse(rest)
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


def command_parser() -> OverviewParser:
    """What parses the whole command line."""
    parser = OverviewParser()
    commands = parser.add_commands("commands", "COMMAND")
    _add_init(commands)
    _add_completion(commands)
    _add_pipeline(commands)
    _add_schema(commands)
    _add_looking(commands)
    _add_changing(commands)
    _add_removing(commands)
    _add_reporting(commands)
    _add_relay(commands)
    _add_consume(commands)
    _add_bindings(commands)
    _add_dead(commands)
    return parser


def _command(commands: Any, name: str, run: str, text: str) -> ArgumentParser:
    """A command over a ledger's table."""
    command = _ledger_command(commands, name, run, text)
    _add_table(command)
    return command


def _ledger_command(commands: Any, name: str, run: str, text: str) -> ArgumentParser:
    """A command that takes --ledger."""
    command = _plain_command(commands, name, run, text)
    _add_url(command, "--ledger", "sqlite:///ledger.db", "ONCELY_LEDGER")
    return command


def _plain_command(commands: Any, name: str, run: str, text: str) -> ArgumentParser:
    """A command that takes --json."""
    command = _bare_command(commands, name, run, text)
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return command


def _bare_command(commands: Any, name: str, run: str, text: str) -> CommandParser:
    """A command; `run` is where its function is, as module:name."""
    command: CommandParser = commands.add_parser(name, help=text, description=f"{text}.")
    command.epilog = f"example: {EXAMPLES[command.prog]}"
    command.set_defaults(run=f"oncely.cli.{run}", extra="cli", parser=command)
    return command


def _command_group(commands: Any, name: str, text: str) -> Any:
    """A command that is one of several actions: what these are added to."""
    group: CommandParser = commands.add_parser(name, help=text, description=f"{text}.")
    return group.add_commands("actions", "ACTION")


# ---- Commands ----------------------------------------------------------------------------------


def _add_init(commands: Any) -> None:
    text = "write a first program that runs"
    init = _bare_command(commands, "init", "init_command:init", text)
    told = "where it is written (default: the current folder)"
    init.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help=told)
    told = f"what is to be done once: {'; '.join(f'{n}: {s.text}' for n, s in STARTERS.items())}"
    init.add_argument("--delivery", choices=list(STARTERS), help=told)
    told = f"where the ledger is to be: {'; '.join(f'{n}: {s.text}' for n, s in STORES.items())}"
    init.add_argument("--store", choices=list(STORES), help=f"{told} (default: sqlite)")
    init.add_argument("--force", action="store_true", help="overwrite files that are there")


def _add_completion(commands: Any) -> None:
    text = "print what lets a shell complete commands and options"
    completion = _bare_command(commands, "completion", "completion:completion", text)
    completion.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def _add_pipeline(commands: Any) -> None:
    actions = _command_group(commands, "pipeline", "run a pipeline on Spark")
    text = (
        "run the pipeline that a TOML file describes; --ledger, --table and --schema replace the "
        "file's"
    )
    run = _ledger_command(actions, "run", "pipeline:run", text)
    _add_table(run, of_file=True)
    run.set_defaults(extra="spark")
    text = "go on until no message of the consumer waits to be tried again"
    run.add_argument("--drain", action="store_true", help=text)
    text = "print the traceback of what ends the run, Python's and Java's"
    run.add_argument("--verbose", action="store_true", help=text)
    run.add_argument("file", metavar="FILE.toml", help="what describes the pipeline")


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
    status = _command(commands, "status", "status:status", "count records by consumer and state")
    text = "again and again, every so many seconds (default: 2), until stopped"
    status.add_argument(
        "--watch", metavar="SECONDS", nargs="?", const=2.0, type=values.pause, help=text
    )

    text = "list records, the least recently seen first"
    list_ = _command(commands, "list", "record_commands:list_records", text)
    _add_filters(list_)
    _add_number(list_, "--limit", "how many at most", 100)
    _add_sort(list_)

    text = "show all fields of a message's record, of each consumer that has one"
    show = _command(commands, "show", "record_commands:show", text)
    _add_id(show)
    _add_consumer(show)

    text = "list messages that have failed and wait in the ledger to be tried again, and when"
    waiting = _command(commands, "waiting", "waiting:waiting", text)
    _add_consumer(waiting)
    _add_number(waiting, "--limit", "how many at most", 100)


def _add_changing(commands: Any) -> None:
    text = (
        "allow what has failed or is in doubt to run again: at once where its message waits in "
        "the ledger or is a dead letter there, else with its next delivery"
    )
    reset = _command(commands, "reset", "changes:reset", text)
    _add_changes(reset, ops.RESETTABLE)

    text = (
        "remove records that nobody works on; the next delivery is treated as new, and so is a "
        "message that waits in the ledger, which stays there"
    )
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
    _add_table(reconcile, of_file=True)
    reconcile.set_defaults(extra="spark")
    text = "a pipeline's, or one with just the tables [source] and [message]"
    reconcile.add_argument("file", metavar="FILE.toml", help=text)
    _add_consumer(reconcile, "whose records are looked at, instead of the file's")
    _add_archived(reconcile)
    text = "a new folder, for the details as Parquet"
    reconcile.add_argument("--to", metavar="FOLDER", help=text)

    text = "write a page of plots of what ledger and archive know"
    report = _command(commands, "report", "report_command:run", text)
    report.set_defaults(extra="report")
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
    text = "make queues that are missing; else what is for one is set aside"
    relay.add_argument("--create-queues", action="store_true", help=text)
    _add_running(relay)


def _add_consume(commands: Any) -> None:
    text = "run a consumer until stopped, or until its queue is empty"
    consume = _plain_command(commands, "consume", "consume:consume", text)
    _add_own_consumer(consume)
    _add_number(consume, "--workers", "processes, each started again when it dies", 1)
    text = "end when nothing is waiting, delayed or in flight"
    consume.add_argument("--drain", action="store_true", help=text)
    _add_running(consume)
    # Between a supervisor and its workers.
    consume.add_argument("--lifeline", metavar="FD", type=int, help=argparse.SUPPRESS)
    consume.add_argument("--worker", metavar="N", type=int, help=argparse.SUPPRESS)


def _add_bindings(commands: Any) -> None:
    text = "look at what brings events into a consumer's queue, and remove what no handler needs"
    actions = _command_group(commands, "bindings", text)
    text = "list the bindings of the consumer's queue, and whether a handler needs each"
    _add_own_consumer(_plain_command(actions, "list", "bindings:list_bindings", text))

    text = "remove the bindings that no handler needs, once no older version of the consumer runs"
    prune = _plain_command(actions, "prune", "bindings:prune", text)
    _add_own_consumer(prune)
    prune.add_argument("--yes", action="store_true", help="do not ask before any is removed")


def _add_dead(commands: Any) -> None:
    text = "look at dead letters, and say what becomes of them"
    actions = _command_group(commands, "dead", text)
    text = "list dead letters, in the order in which they came"
    list_ = _command(actions, "list", "dead:list_letters", text)
    _add_consumer(list_)
    _add_number(list_, "--limit", "how many at most", 100)
    _add_sort(list_)

    text = "show a dead letter in full, with headers, body and error; passwords are masked"
    _add_letter(_command(actions, "show", "dead:show", text))

    text = "let dead letters be handled again, at once, their attempts from zero"
    retry = _command(actions, "retry", "dead_changes:retry", text)
    _add_letters(retry)
    _add_note(retry)

    _add_edit(actions)

    text = (
        "write dead letters to a file, one JSON object a line: whole, as they came, no password "
        "in them masked; they stay in the ledger"
    )
    export = _command(actions, "export", "dead:export", text)
    _add_consumer(export)
    export.add_argument("file", metavar="FILE", help="replaced, if it is there; - for stdout")

    text = "remove dead letters for ever; their records stay as they are"
    discard = _command(actions, "discard", "dead_changes:discard", text)
    _add_letters(discard)
    discard.add_argument("--yes", action="store_true", help="do not ask before many are removed")
    _add_note(discard)


def _add_edit(actions: Any) -> None:
    text = (
        "let a dead letter be handled again, with other content: what is named here, or the body "
        "as $EDITOR leaves it"
    )
    edit = _command(actions, "edit", "dead_changes:edit", text)
    _add_letter(edit)
    edit.add_argument("--body", metavar="FILE", help="has the new body; - for stdin")
    text = "set one header; may be repeated"
    edit.add_argument(
        "--header",
        metavar="NAME=VALUE",
        type=values.header,
        action="append",
        default=[],
        help=text,
    )
    edit.add_argument("--type", metavar="TYPE", help="the new type")
    text = "the message id, of one that has none"
    type_ = partial(values.name, "--id", "id")
    edit.add_argument("--id", metavar="ID", dest="new_id", type=type_, help=text)
    _add_note(edit)


# ---- Options -----------------------------------------------------------------------------------


def _add_own_consumer(command: ArgumentParser) -> None:
    """A consumer of the user's, and what replaces its own ledger and transport."""
    command.add_argument(
        "consumer", metavar="module:consumer", help="importable from the current folder"
    )
    # Not from the environment: what is set there for the other commands would let a consumer
    # forget, without a word, what its own ledger knows.
    text = "instead of the module's own, such as env:NAME or file:PATH"
    command.add_argument("--ledger", metavar="URL", help=text)
    _add_table(command)
    command.add_argument("--transport", metavar="URL", help=text)


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


def _add_sort(command: ArgumentParser) -> None:
    text = "which come first, and are shown where there are more (default: oldest)"
    command.add_argument("--sort", choices=("oldest", "newest"), default="oldest", help=text)


def _add_letter(command: ArgumentParser) -> None:
    text = "the number of a dead letter, as list shows it"
    command.add_argument("id", metavar="ID", type=values.letter, help=text)


def _add_letters(command: ArgumentParser) -> None:
    text = "the numbers of dead letters, as list shows them"
    command.add_argument("ids", metavar="ID", nargs="*", help=text)
    command.add_argument("--all", action="store_true", help="all, or all of --consumer")
    _add_consumer(command, "with --all: of this consumer only")
    _add_number(command, "--limit", "with --all: how many at most", _MANY)


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


def _add_table(command: ArgumentParser, *, of_file: bool = False) -> None:
    """The ledger's table; where it is `of_file`, what is typed comes before what stands there."""
    first, table = ("the file's, else ", None) if of_file else ("", TABLE_NAME)
    text = f"of the ledger (default: {first}{TABLE_NAME})"
    command.add_argument("--table", metavar="NAME", default=table, help=text)
    text = f"of the table (default: {first}the database's)"
    command.add_argument("--schema", metavar="NAME", help=text)


def _add_running(command: ArgumentParser) -> None:
    """What a command that works for long is told of its log and its port."""
    text = "how much is logged on stderr (default: info)"
    command.add_argument("--log-level", choices=LEVELS, default="info", help=text)
    text = "a line for people, or a JSON object, for each event (default: text)"
    command.add_argument("--log-format", choices=FORMATS, default="text", help=text)
    text = "answer there to /metrics, /live and /ready; 0: any that is free, which is logged"
    command.add_argument("--metrics-port", metavar="PORT", type=values.port, help=text)
    text = "where (default: 127.0.0.1; 0.0.0.0: on all interfaces)"
    command.add_argument("--metrics-host", metavar="HOST", default="127.0.0.1", help=text)
    command.set_defaults(worker=None)


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
