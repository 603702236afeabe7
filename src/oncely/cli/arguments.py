"""Every command and option of the command line; each value is checked when it is parsed."""

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

    Raises ConfigError for wrong usage. Without arguments it prints the help and raises
    SystemExit, as with --help.
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
    """Add those of `rest` that are IDs; return the others.

    Once argparse has begun to fill a list, it leaves over the arguments after an option.
    """
    dashes = rest.index("--") if "--" in rest else len(rest)
    unknown = [word for word in rest[:dashes] if word.startswith("-")]
    ids += [word for word in rest[:dashes] if word not in unknown]
    ids += rest[dashes + 1 :]
    return unknown


def command_parser() -> OverviewParser:
    """The parser of the whole command line."""
    parser = OverviewParser()
    commands = parser.add_commands("commands", "COMMAND")
    _add_init(commands)
    _add_completion(commands)
    _add_pipeline(commands)
    _add_schema(commands)
    _add_looking(commands)
    _add_changing(commands)
    _add_removing(commands)
    _add_web(commands)
    _add_reporting(commands)
    _add_relay(commands)
    _add_consume(commands)
    _add_bindings(commands)
    _add_dead(commands)
    _add_outbox(commands)
    return parser


def _command(commands: Any, name: str, run: str, text: str) -> ArgumentParser:
    """A command on a ledger's table."""
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
    """A command with several actions: the object to which they are added."""
    group: CommandParser = commands.add_parser(name, help=text, description=f"{text}.")
    return group.add_commands("actions", "ACTION")


# ---- Commands ----------------------------------------------------------------------------------


def _add_init(commands: Any) -> None:
    text = "write a first program that runs"
    init = _bare_command(commands, "init", "init_command:init", text)
    told = "the folder to write it to (default: the current folder)"
    init.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help=told)
    told = f"what to process once: {'; '.join(f'{n}: {s.text}' for n, s in STARTERS.items())}"
    init.add_argument("--delivery", choices=list(STARTERS), help=told)
    told = f"where to keep the ledger: {'; '.join(f'{n}: {s.text}' for n, s in STORES.items())}"
    init.add_argument("--store", choices=list(STORES), help=f"{told} (default: sqlite)")
    init.add_argument("--force", action="store_true", help="overwrite existing files")


def _add_completion(commands: Any) -> None:
    text = "print a script with which a shell completes commands and options"
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
    text = "go on until no message of the consumer waits for a retry"
    run.add_argument("--drain", action="store_true", help=text)
    text = "if the run ends with an error, print its tracebacks, of Python and of Java"
    run.add_argument("--verbose", action="store_true", help=text)
    run.add_argument("file", metavar="FILE.toml", help="the pipeline file")


def _add_schema(commands: Any) -> None:
    migrate = _command(commands, "migrate", "schema:migrate", "create or upgrade the schema")
    migrate.add_argument("--sql", action="store_true", help="print the SQL and change nothing")

    text = "find what can lose or repeat messages: the schema, store settings, retention, lease"
    check = _command(commands, "check", "schema:check", text)
    _add_duration(check, "--replay-window", "how long a message may be delivered again")
    text = "how long records are kept, instead of each consumer's own retention"
    _add_duration(check, "--retention", text)
    _add_duration(check, "--broker-timeout", "how long the broker waits for an acknowledgement")
    text = f"a claim's time limit, or none (default: {ops.LEASE})"
    check.add_argument("--lease", metavar="TIME", type=values.lease, default=ops.LEASE, help=text)


def _add_looking(commands: Any) -> None:
    status = _command(commands, "status", "status:status", "count records by consumer and state")
    text = "count again every so many seconds (default: 2) until stopped"
    status.add_argument(
        "--watch", metavar="SECONDS", nargs="?", const=2.0, type=values.pause, help=text
    )

    _add_list(commands)

    text = "show all fields of a message's record, of each consumer that has one"
    show = _command(commands, "show", "record_commands:show", text)
    _add_id(show)
    _add_consumer(show)
    text = "and all that is known of it in the order of time, people's changes among it"
    show.add_argument("--story", action="store_true", help=text)

    text = "list the processes that work with the ledger, those that were killed among them"
    _command(commands, "workers", "activity:workers", text)

    text = "show what came of the messages of each consumer in the last hour and day"
    _command(commands, "activity", "activity:activity", text)

    text = "list the runs on Spark, the newest first"
    runs = _command(commands, "runs", "activity:runs", text)
    _add_number(runs, "--limit", "how many at most", 50)

    text = "list what people have changed, the newest first"
    audit = _command(commands, "audit", "activity:audit", text)
    _add_number(audit, "--limit", "how many at most", 100)
    type_ = partial(values.number, "--before")
    text = "only entries numbered below this"
    audit.add_argument("--before", metavar="N", type=type_, help=text)

    text = "list failed messages that wait in the ledger for a retry, and when they are due"
    waiting = _command(commands, "waiting", "waiting:waiting", text)
    _add_consumer(waiting)
    _add_number(waiting, "--limit", "how many at most", 100)


def _add_list(commands: Any) -> None:
    text = "list records, the least recently seen first, or in the order of their ids"
    list_ = _command(commands, "list", "record_commands:list_records", text)
    _add_filters(list_)
    _add_number(list_, "--limit", "how many at most", 100)
    text = (
        "which to list first: oldest and newest read all records that match; id reads until --limit"
        " are found (default: oldest)"
    )
    list_.add_argument("--sort", choices=("oldest", "newest", "id"), default="oldest", help=text)
    text = "with --sort id: only message ids that begin with this text"
    type_ = partial(values.name, "--id-begins", "text")
    list_.add_argument("--id-begins", metavar="TEXT", dest="begins", type=type_, help=text)
    text = "with --sort id: go on after this message id, where the list before has ended"
    list_.add_argument("--after", metavar="ID", help=text)


def _add_web(commands: Any) -> None:
    text = "serve a dashboard: what is stuck, why, and what operators decide about it"
    web = _command(commands, "web", "web_command:web", text)
    web.set_defaults(extra="web")
    text = "where (default: 127.0.0.1, which only this machine can reach)"
    web.add_argument("--host", metavar="HOST", default="127.0.0.1", help=text)
    text = "the port, or 0 for any that is free (default: 8470)"
    port = partial(values.port, "--port", 8470)
    web.add_argument("--port", metavar="PORT", type=port, default=8470, help=text)
    text = "the path below which a proxy serves it, such as /oncely (default: /)"
    web.add_argument("--root-path", metavar="PATH", type=values.root_path, default="/", help=text)
    text = (
        "instead of asking for a token, believe the name that a proxy writes into this header, "
        "such as X-Forwarded-User"
    )
    web.add_argument("--user-header", metavar="NAME", help=text)
    text = (
        "an address or network of the proxy whose --user-header and X-Forwarded-Proto are "
        "believed; may be repeated (default: this machine)"
    )
    web.add_argument("--trusted-proxy", metavar="ADDRESS", action="append", default=[], help=text)
    text = "who of those may decide, * for all; may be repeated"
    web.add_argument("--operator", metavar="USER", action="append", default=[], help=text)
    text = "the function that operators may ask about this consumer's messages in doubt"
    web.add_argument(
        "--probe",
        metavar="CONSUMER=module:function",
        type=values.probe,
        action="append",
        default=[],
        help=f"{text}; may be repeated",
    )


def _add_changing(commands: Any) -> None:
    text = (
        "allow failed and in-doubt messages to run again: at once if the ledger has the message, "
        "waiting or as a dead letter, else with its next delivery"
    )
    reset = _command(commands, "reset", "changes:reset", text)
    _add_changes(reset, ops.RESETTABLE)

    text = "say of a message in doubt whether its effect has happened"
    settle = _command(commands, "settle", "changes:settle", text)
    _add_id(settle)
    _add_consumer(settle)
    answers = settle.add_mutually_exclusive_group(required=True)
    text = "it has: the message is completed, and nothing of it runs again"
    answers.add_argument("--happened", action="store_true", help=text)
    text = "it has not: the message runs again, as after reset"
    answers.add_argument("--not-happened", action="store_true", help=text)
    text = "ask this function, as a policy's on_in_doubt, importable from the current folder"
    answers.add_argument("--probe", metavar="module:function", help=text)
    _add_note(settle)

    for name, run, text in (
        ("run-now", "run_now", "let a message that waits for its retry be due at once"),
        ("cancel", "cancel", "make a dead letter of a message that waits for its retry"),
    ):
        command = _command(commands, name, f"changes:{run}", text)
        _add_id(command)
        _add_consumer(command)
        _add_note(command)

    text = (
        "remove records that no worker is processing; the next delivery is treated as new, and so "
        "is a message that waits in the ledger, which stays there"
    )
    forget = _command(commands, "forget", "changes:forget", text)
    _add_changes(forget, ops.STATES)


def _add_removing(commands: Any) -> None:
    text = "remove records that were completed or failed long ago"
    purge = _command(commands, "purge", "purge:purge", text)
    _add_retention(purge)
    _add_number(purge, "--batch", "records in one transaction", 1_000)
    _add_note(purge)

    text = "write records that were completed or failed long ago to Parquet, then remove them"
    archive = _command(commands, "archive", "archive:archive", text)
    archive.set_defaults(extra="archive")
    text = "a path, or a URI such as s3://bucket/folder"
    archive.add_argument("--to", metavar="FOLDER", required=True, help=text)
    _add_retention(archive)
    _add_number(archive, "--batch", "records held in memory at once", 50_000)
    _add_note(archive)


def _add_reporting(commands: Any) -> None:
    text = "compare a source of messages with the ledger and the archive, on Spark"
    reconcile = _ledger_command(commands, "reconcile", "reconcile_command:run", text)
    _add_table(reconcile, of_file=True)
    reconcile.set_defaults(extra="spark")
    text = "a pipeline file, or a file with only the tables [source] and [message]"
    reconcile.add_argument("file", metavar="FILE.toml", help=text)
    _add_consumer(reconcile, "the consumer to compare, instead of the file's")
    text = "a folder that oncely archive has written; its records are read, too"
    reconcile.add_argument("--archive", metavar="FOLDER", help=text)
    text = "a new folder, to which the details are written as Parquet"
    reconcile.add_argument("--to", metavar="FOLDER", help=text)

    text = "write the pages of the dashboard to one HTML file"
    report = _command(commands, "report", "report_command:run", text)
    report.set_defaults(extra="report")
    text = "the file to write; an existing one is replaced"
    report.add_argument("--to", metavar="FILE.html", required=True, help=text)


def _add_relay(commands: Any) -> None:
    text = "send deferred messages until stopped, or until nothing more can be sent"
    relay = _command(commands, "relay", "relay:relay", text)
    _add_url(relay, "--transport", "sqlite:///queue.db", "ONCELY_TRANSPORT")
    relay.add_argument("--drain", action="store_true", help="end when nothing more can be sent")
    _add_number(relay, "--batch", "messages taken in one batch", 100)
    text = "how often to look for messages, also without a notification"
    _add_duration(relay, "--poll", text, "1s")
    _add_number(relay, "--tries", "attempts before a refused message is set aside", 10)
    text = "retry set-aside messages first"
    relay.add_argument("--retry-set-aside", action="store_true", help=text)
    _add_note(relay, "with --retry-set-aside: ")
    text = "create missing queues, instead of setting their messages aside"
    relay.add_argument("--create-queues", action="store_true", help=text)
    _add_running(relay)


def _add_consume(commands: Any) -> None:
    text = "run a consumer until stopped, or until its queue is empty"
    consume = _plain_command(commands, "consume", "consume:consume", text)
    _add_own_consumer(consume)
    _add_number(consume, "--workers", "worker processes; one that dies is restarted", 1)
    text = "end when nothing is waiting, delayed or in flight"
    consume.add_argument("--drain", action="store_true", help=text)
    _add_running(consume)
    # Between a supervisor and its workers.
    consume.add_argument("--lifeline", metavar="FD", type=int, help=argparse.SUPPRESS)
    consume.add_argument("--worker", metavar="N", type=int, help=argparse.SUPPRESS)


def _add_bindings(commands: Any) -> None:
    text = "list the bindings of a consumer's queue, and remove those that no handler needs"
    actions = _command_group(commands, "bindings", text)
    text = "list the bindings of the consumer's queue, and whether a handler needs each"
    _add_own_consumer(_plain_command(actions, "list", "bindings:list_bindings", text))

    text = "remove the bindings that no handler needs, once no older version of the consumer runs"
    prune = _plain_command(actions, "prune", "bindings:prune", text)
    _add_own_consumer(prune)
    prune.add_argument("--yes", action="store_true", help="do not ask before any is removed")
    _add_note(prune)


def _add_outbox(commands: Any) -> None:
    text = "look at messages to be sent, and say what becomes of those that were refused"
    actions = _command_group(commands, "outbox", text)
    text = "count messages to be sent by destination, and those that were refused"
    _command(actions, "status", "outbox:status", text)

    text = "list messages to be sent, in the order in which they came"
    list_ = _command(actions, "list", "outbox:list_messages", text)
    list_.add_argument("--destination", metavar="NAME", help="to this destination only")
    list_.add_argument("--refused", action="store_true", help="those that were refused, instead")
    _add_number(list_, "--limit", "how many at most", 100)

    for name, run, text in (
        ("send-again", "send_again", "let messages that were refused be sent after all"),
        ("discard", "discard", "remove messages that were refused, which are never sent then"),
    ):
        command = _command(actions, name, f"outbox:{run}", text)
        told = "the numbers of messages, as list --refused shows them"
        command.add_argument("ids", metavar="ID", nargs="+", type=values.letter, help=told)
        _add_note(command)

    text = "list the messages that wait in a queue of the ledger"
    queue = _command(commands, "queue", "outbox:queue", text)
    queue.add_argument("name", metavar="NAME", help="of the queue, as status shows it")
    _add_number(queue, "--limit", "how many at most", 100)


def _add_dead(commands: Any) -> None:
    text = "list, show, retry, edit, export and discard dead letters"
    actions = _command_group(commands, "dead", text)
    text = "list dead letters, the oldest or the newest first"
    list_ = _command(actions, "list", "dead:list_letters", text)
    _add_consumer(list_)
    _add_number(list_, "--limit", "how many at most", 100)
    text = "which to list first; --limit leaves out the rest (default: oldest)"
    list_.add_argument("--sort", choices=("oldest", "newest"), default="oldest", help=text)

    text = "count dead letters by consumer and error, those that failed alike together"
    groups = _command(actions, "groups", "dead:list_groups", text)
    _add_consumer(groups)
    _add_number(groups, "--limit", "how many dead letters are looked at, at most", _MANY)

    text = "show a dead letter in full, with headers, body and error; passwords are masked"
    _add_letter(_command(actions, "show", "dead:show", text))

    text = "retry dead letters at once; their attempts are counted from zero"
    retry = _command(actions, "retry", "dead_changes:retry", text)
    _add_letters(retry)
    _add_note(retry)

    _add_edit(actions)

    text = (
        "write dead letters to a file, one JSON object a line, as they came: passwords are not "
        "masked; the dead letters stay in the ledger"
    )
    export = _command(actions, "export", "dead:export", text)
    _add_consumer(export)
    _add_group(export)
    text = "the file to write, - for stdout; an existing file is replaced"
    export.add_argument("file", metavar="FILE", help=text)

    text = "remove dead letters permanently; their records stay as they are"
    discard = _command(actions, "discard", "dead_changes:discard", text)
    _add_letters(discard)
    discard.add_argument("--yes", action="store_true", help="do not ask before many are removed")
    _add_note(discard)


def _add_edit(actions: Any) -> None:
    text = (
        "retry a dead letter with other content: what the options name, or the body as you edit "
        "it in $EDITOR"
    )
    edit = _command(actions, "edit", "dead_changes:edit", text)
    _add_letter(edit)
    edit.add_argument("--body", metavar="FILE", help="the file of the new body; - for stdin")
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
    text = "the message id, for a message that has none"
    type_ = partial(values.name, "--id", "id")
    edit.add_argument("--id", metavar="ID", dest="new_id", type=type_, help=text)
    _add_note(edit)


# ---- Options -----------------------------------------------------------------------------------


def _add_own_consumer(command: ArgumentParser) -> None:
    """The user's consumer, and the options that replace its ledger and its transport."""
    command.add_argument(
        "consumer", metavar="module:consumer", help="importable from the current folder"
    )
    # Not from the environment: a ledger that is set there for the other commands would replace the
    # consumer's own without a word, and with it all that the consumer knows.
    text = "instead of the module's own, such as env:NAME or file:PATH"
    command.add_argument("--ledger", metavar="URL", help=text)
    _add_table(command)
    command.add_argument("--transport", metavar="URL", help=text)


def _add_id(command: ArgumentParser, **how: Any) -> None:
    text = "the message id; write -- before an id that begins with a dash"
    command.add_argument(
        "id", metavar="ID", type=partial(values.name, "ID", "id"), help=text, **how
    )


def _add_consumer(command: ArgumentParser, text: str = "of this consumer only") -> None:
    type_ = partial(values.name, "--consumer", "consumer")
    command.add_argument("--consumer", metavar="NAME", type=type_, help=text)


def _add_retention(command: ArgumentParser) -> None:
    """Which records are past their retention."""
    text = f"last seen longer ago, instead of each consumer's own retention (else {ops.RETENTION})"
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


def _add_url(command: ArgumentParser, name: str, example: str, variable: str) -> None:
    told = f"such as {example}, env:NAME or file:PATH (default: ${variable})"
    command.add_argument(name, metavar="URL", default=os.environ.get(variable), help=told)


def _add_letter(command: ArgumentParser) -> None:
    text = "the number of a dead letter, as list shows it"
    command.add_argument("id", metavar="ID", type=values.letter, help=text)


def _add_letters(command: ArgumentParser) -> None:
    text = "the numbers of dead letters, as list shows them"
    command.add_argument("ids", metavar="ID", nargs="*", help=text)
    command.add_argument("--all", action="store_true", help="all, or all of --consumer")
    _add_group(command)
    _add_consumer(command, "with --all or --group: of this consumer only")
    _add_number(command, "--limit", "with --all or --group: how many are looked at, at most", _MANY)


def _add_group(command: ArgumentParser) -> None:
    text = "those that failed alike; its id is shown by: oncely dead groups"
    command.add_argument("--group", metavar="GROUP", help=text)


def _add_filters(command: ArgumentParser, states: Iterable[str] = ops.STATES) -> None:
    words = list(states)
    type_ = partial(values.state, words)
    command.add_argument("--state", metavar="STATE", type=type_, help=", ".join(words))
    _add_consumer(command)
    _add_duration(command, "--older-than", "last seen longer ago than this")
    type_ = partial(values.name, "--id-contains", "text")
    text = "only message ids with this text in them"
    command.add_argument("--id-contains", metavar="TEXT", dest="text", type=type_, help=text)


def _add_changes(command: ArgumentParser, states: Iterable[str]) -> None:
    _add_id(command, nargs="?")
    _add_filters(command, states)
    _add_number(command, "--limit", "how many at most", _MANY)
    command.add_argument("--yes", action="store_true", help="do not ask before many are changed")
    _add_note(command)


def _add_note(command: ArgumentParser, when: str = "") -> None:
    text = f"{when}the reason, which is logged with the change"
    command.add_argument("--why", metavar="TEXT", default="", help=text)
    text = f"{when}who makes the change (default: your login name)"
    command.add_argument("--by", metavar="NAME", help=text)


def _add_table(command: ArgumentParser, *, of_file: bool = False) -> None:
    """The ledger's table; `of_file`: the options win over the pipeline file."""
    first, table = ("the file's, else ", None) if of_file else ("", TABLE_NAME)
    text = f"the ledger's table (default: {first}{TABLE_NAME})"
    command.add_argument("--table", metavar="NAME", default=table, help=text)
    text = f"the table's schema (default: {first}the database's)"
    command.add_argument("--schema", metavar="NAME", help=text)


def _add_running(command: ArgumentParser) -> None:
    """The options of a long-running command for its log and its monitoring port."""
    text = "the lowest level that is logged on stderr (default: info)"
    command.add_argument("--log-level", choices=LEVELS, default="info", help=text)
    text = "a line for people, or a JSON object, for each event (default: text)"
    command.add_argument("--log-format", choices=FORMATS, default="text", help=text)
    text = "serve /metrics, /live and /ready on this port; 0: any free port, which is logged"
    port = partial(values.port, "--metrics-port", 9464)
    command.add_argument("--metrics-port", metavar="PORT", type=port, help=text)
    text = "the address of that port (default: 127.0.0.1; 0.0.0.0: all interfaces)"
    command.add_argument("--metrics-host", metavar="HOST", default="127.0.0.1", help=text)
    command.set_defaults(worker=None)


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
