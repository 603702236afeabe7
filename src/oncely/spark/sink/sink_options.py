"""The options of the sink, from Spark's strings to checked values."""

import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.machinery import PathFinder
from typing import Any, Literal, cast, get_args

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.policy import POLICY_FIELDS, Policy
from oncely.lifecycle.retry_queue import RetryQueue
from oncely.lifecycle.wrapping import check_function, check_takes
from oncely.locations import LedgerAddress, check_shared
from oncely.spark.option_values import (
    as_names,
    check_consumer,
    choice,
    refuse_unknown,
    required,
    share,
    unknown,
    whole_number,
)
from oncely.spark.sink.paths import absolute_paths, check_apart, check_quarantine
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import check_transactions

Handler = Callable[[Message], Any]
Mode = Literal["leased", "transactional", "rows"]
FailIf = Literal["all", "any", "never"]

BATCH_JOB = "batch_job"
"""An option of the sink only for the jobs of a batch handler."""
_DEFAULT_CHUNK = 1_000
_DEFAULT_CHUNK_OF_ROWS = 5_000
_TABLE = re.compile(r"(?:[^\W\d]\w*\.)?[^\W\d]\w*")
LAKES = ("delta:", "iceberg:")
"""How tables of Delta Lake and Apache Iceberg begin, which are not in the ledger's database."""
_LAKE_TABLE = re.compile(r"delta:.+|iceberg:[^.]+(?:\.[^.]+){2,}")
_WITH_HANDLER: Sequence[Mode] = ("leased", "transactional")
_ONLY_IN: Mapping[str, tuple[Sequence[Mode], str]] = {
    **dict.fromkeys(
        ("table", "upsert", "sequence_by"),
        (("rows",), 'writes no rows; write .option("mode", "rows")'),
    ),
    "archive": (_WITH_HANDLER, "looks nothing up there; drop it"),
    "handler": (_WITH_HANDLER, "calls none; drop it, or write another mode"),
    "max_failures": (_WITH_HANDLER, "calls no handler; drop it"),
    "handler_batch": (("leased",), 'calls none; drop it, or "mode"'),
    "concurrency": (
        ("leased",),
        'works on one transaction at a time in a task; write .option("mode", "leased")',
    ),
}
"""Options of some modes: the modes, and why others refuse them."""
_BY_NAME = ("on_in_doubt", "in_doubt_on")
_FIXED = ("on_outage", "on_missing_id")


@dataclass(frozen=True)
class SinkOptions:
    """The checked options of `format("oncely")`; sent to the executors."""

    mode: Mode
    consumer: str
    address: LedgerAddress = field(repr=False)
    """Where the ledger is."""
    handler: str
    """module:function; empty in mode `rows`, and with a batch handler."""
    handler_batch: str | None
    """The batch handler, called on the driver; None if a handler is called for each message."""
    staging: str | None
    """The folder or URI for a batch until its handler has ended; None: beside the quarantine."""
    handler_path: str | None
    """A folder to import the handler from."""
    policy: Policy
    named: Mapping[str, str]
    """The policy's probe and its `in_doubt_on`, by name. They are not part of the policy here: what
    is in `handler_path` can be imported only after that is set."""
    chunk: int
    """The most messages that are claimed at once."""
    concurrency: int
    """How many handlers a task runs at a time, in mode `leased`."""
    quarantine: str
    """The folder or URI for rows that are not messages, as Parquet."""
    since: float | None
    """Duplicates of messages first seen from this time on (the store's clock, seconds since 1970)
    count as duplicates in the input; None: from the start of the task."""
    transport: str | None = field(repr=False)
    """What sends the messages that handlers send: a URL, env:NAME or file:PATH; None: a relay."""
    channel: str | None
    """host:port of the driver's channel."""
    channel_token: str
    """The secret of the channel; Spark masks options with such a name."""
    table: str | None
    """In mode `rows`: the target table, as "table" or "schema.table", "delta:PATH" or
    "iceberg:CATALOG.NAMESPACE.TABLE"."""
    archive: str | None
    """The archive, for messages older than the retention: a folder, or a URI."""
    upsert: tuple[str, ...]
    """In mode `rows`: the columns of the key by which rows replace existing rows."""
    sequence_by: str | None
    """With `upsert`: the column by which an existing row may be newer, and is not replaced."""
    report: str | None
    """The name under which a commit hands its counts over, on the driver's machine."""
    fail_if: FailIf | None
    """When a commit raises: if no new message was handled, or not all of them; None: a warning if
    none was."""
    max_failures: float | None
    """The share of a batch's handler runs that may fail; if more fail, its commit raises."""
    stops_early: bool
    """Whether a task ends when nearly all handlers have failed for one reason: in a pipeline."""

    def whole_policy(self) -> Policy:
        """The policy with what is named. Raises ConfigError if that cannot be imported."""
        if not self.named:
            return self.policy
        return replace(self.policy, **_imported(self.named, self.handler_path))


_LEDGER = {"ledger", "ledger_table", "ledger_schema"}
_OWN = {each.name for each in fields(SinkOptions)} - {"address", "policy", "named"}
_NAMES = _OWN | _LEDGER | set(POLICY_FIELDS)


def runs_batches(options: Mapping[str, str]) -> bool:
    """Whether the program, and not each task, handles what is new."""
    return bool(options.get("handler_batch")) or options.get("table", "").startswith(LAKES)


def read_options(options: Mapping[str, str]) -> SinkOptions:
    """Check the options of the sink. Raises ConfigError, which names the option."""
    given = absolute_paths({name.lower(): value for name, value in options.items()})
    refuse_unknown(given, _NAMES)
    policy = read_policy(_policy_values(given), given.get("handler_path"))
    mode = cast(Mode, choice("mode", given.get("mode", "leased"), get_args(Mode)))
    named = {name: given[name] for name in _BY_NAME if name in given}
    plain = "hold" if callable(policy.on_in_doubt) else policy.on_in_doubt
    _check_mode(mode, given, policy)
    transport = given.get("transport")
    consumer = check_consumer(required(given, "consumer", "billing"))
    RetryQueue(consumer)  # Its name has to leave room.
    ledger = required(given, "ledger", "sqlite:////var/lib/ledger.db")
    if mode == "transactional":
        try:
            check_transactions(ledger)
        except ConfigError as error:
            raise ConfigError(f'{error}, or write mode "leased"') from None
    check_shared(ledger)
    names = ("quarantine", "archive", "staging", "checkpointLocation")
    places = {f"option {name}": given.get(name.lower()) for name in names}
    file = ledger.removeprefix("sqlite:///") if ledger.startswith("sqlite:") else None
    if given.get("table", "").startswith("delta:"):
        places["option table"] = given["table"].removeprefix("delta:")
    check_apart({"option ledger": file, **places})
    table, schema = given.get("ledger_table", TABLE_NAME), given.get("ledger_schema")
    calls_none = mode == "rows" or given.get("handler_batch")
    return SinkOptions(
        mode=mode,
        consumer=consumer,
        address=LedgerAddress(ledger, table, schema),
        handler="" if calls_none else required(given, "handler", "shop.billing:charge"),
        handler_batch=given.get("handler_batch"),
        staging=given.get("staging"),
        handler_path=given.get("handler_path"),
        policy=replace(policy, on_in_doubt=plain, in_doubt_on=()) if named else policy,
        named=named,
        chunk=whole_number(
            given, "chunk", _DEFAULT_CHUNK_OF_ROWS if mode == "rows" else _DEFAULT_CHUNK
        ),
        concurrency=whole_number(given, "concurrency", 1),
        quarantine=given["quarantine"],
        since=float(given["since"]) if "since" in given else None,
        transport=None if transport is None else check_shared(transport, "transport"),
        channel=given.get("channel"),
        channel_token=given.get("channel_token", ""),
        table=_table(given) if mode == "rows" else None,
        archive=given.get("archive") or None,
        upsert=as_names(given.get("upsert", "")),
        sequence_by=given.get("sequence_by"),
        report=given.get("report"),
        fail_if=choice("fail_if", given["fail_if"], get_args(FailIf))
        if "fail_if" in given
        else None,
        max_failures=share(given, "max_failures"),
        stops_early="stops_early" in given,
    )


def _check_mode(mode: Mode, given: Mapping[str, str], policy: Policy) -> None:
    """Raise ConfigError for options of another mode."""
    for name, (modes, why) in _ONLY_IN.items():
        if given.get(name) and mode not in modes:
            raise ConfigError(f'option {name}: mode "{mode}" {why}')
    if runs_batches(given):
        _check_batches(given)
    elif given.get("staging"):
        raise ConfigError("option staging: only a batch handler needs it; write handler_batch")
    if "sequence_by" in given and not given.get("upsert"):
        raise ConfigError(
            "option sequence_by: it says which of the rows of one key stays; name the key by"
            ' .option("upsert", "account")'
        )
    if mode == "rows" and callable(policy.on_in_doubt):
        raise ConfigError(
            'on_in_doubt: mode "rows" has no message to ask a probe about; write "retry", "hold"'
            ' or "dead_letter"'
        )


def _check_batches(given: Mapping[str, str]) -> None:
    """Raise ConfigError for options that do not go with batches."""
    for name in ("handler", "transport") if given.get("handler_batch") else ():
        if given.get(name):
            raise ConfigError(f"option {name}: a batch handler runs in its place; drop one of them")
    if "sequence_by" in given and given.get("table", "").startswith(LAKES):
        raise ConfigError(
            "option sequence_by: a table of Delta or Iceberg keeps what was written last; drop it"
        )
    check_transactions(given.get("ledger", ""))


def _table(given: Mapping[str, str]) -> str:
    table = required(given, "table", "payments")
    if not (_LAKE_TABLE if table.startswith(LAKES) else _TABLE).fullmatch(table):
        raise ConfigError(
            f'option table: {table!r} names no table; write "payments" or "public.payments",'
            ' "delta:PATH" or "iceberg:CATALOG.NAMESPACE.TABLE"'
        )
    return table


def check_on_driver(options: SinkOptions) -> None:
    """Raise ConfigError for a handler that cannot be imported, and a folder that cannot be used."""
    if options.handler:
        import_handler(options)
    check_quarantine(options.quarantine)
    if options.archive is not None:
        # Importing Arrow is slow.
        from oncely.archive.lookup import Archive

        Archive(options.archive, options.consumer)


def import_handler(options: SinkOptions) -> Callable[..., Any]:
    """The handler. Raises ConfigError if it cannot be imported, or called as the mode calls it."""
    handler = import_function(options.handler, "handler", options.handler_path)
    check_function(handler, "handler")
    takes = ("message", "session") if options.mode == "transactional" else ("message",)
    check_takes(handler, "handler", takes)
    return handler


def read_policy(table: Mapping[str, Any], folder: str | None = None) -> Policy:
    """A policy that the sink can follow. Raises ConfigError, which names the field.

    A probe and the classes of `in_doubt_on` are importable from `folder`, by their names.
    """
    for name in table.keys() - set(POLICY_FIELDS):
        raise ConfigError(unknown(name, POLICY_FIELDS))
    # A file that is read again contains only duplicates.
    values = {"count_duplicates": "daily", **table}
    if not table.keys().isdisjoint(_BY_NAME):
        values |= _imported(table, folder)
    policy = Policy(**values)
    if policy.lease_s is None:
        raise ConfigError(
            'lease: tasks would wait for ever for the claim of a killed task; write "5m"'
        )
    for name in _FIXED:
        if getattr(policy, name) != getattr(Policy(), name):
            raise ConfigError(f"{name}: on Spark it is always {getattr(Policy(), name)!r}")
    return policy


def _imported(table: Mapping[str, Any], folder: str | None) -> dict[str, Any]:
    """The values of a policy that are imported by name. Raises ConfigError."""
    found: dict[str, Any] = {}
    if ":" in str(table.get("on_in_doubt")):
        found["on_in_doubt"] = import_function(table["on_in_doubt"], "on_in_doubt", folder)
    if (names := table.get("in_doubt_on")) is not None:
        names = as_names(names) if isinstance(names, str) else names
        # "package.module.Class" is enough and, where it is Python's own, "Class".
        parts = [str(name).rpartition(":" if ":" in name else ".") for name in names]
        places = [f"{module or 'builtins'}:{own}" for module, _, own in parts]
        found["in_doubt_on"] = tuple(import_function(x, "in_doubt_on", folder) for x in places)
    return found


def _policy_values(given: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {name: given[name] for name in POLICY_FIELDS if name in given}
    if "tries" in values:
        values["tries"] = whole_number(given, "tries", 0)
    if "backoff" in values:
        values["backoff"] = [delay.strip() for delay in values["backoff"].split(",")]
    return values


def import_function(name: str, what: str, folder: str | None = None) -> Callable[..., Any]:
    """The function of "module:function". Raises ConfigError, which begins with `what`."""
    if ":" not in name:
        raise ConfigError(f'{what}: {name!r} names no function; write "module:function"')
    if folder is not None:
        if sys.path[0] != folder:
            sys.path.insert(0, folder)
        # From the folder if it is there, even if another one was imported before.
        package = name.partition(":")[0].partition(".")[0]
        found = PathFinder.find_spec(package, [folder])
        loaded = sys.modules.get(package)
        # A folder without `__init__.py` has no file.
        file = getattr(loaded, "__file__", None)
        if found is not None and loaded is not None and file != found.origin:
            for each in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
                del sys.modules[each]
    try:
        function = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:
        # Importing runs the user's own code, which may raise anything.
        raise ConfigError(
            f"{what}: {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(f"{what}: {name!r} is not a function")
    return function  # type: ignore[no-any-return]
