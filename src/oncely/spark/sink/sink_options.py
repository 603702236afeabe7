"""The options of the sink: from the strings that Spark carries to values, checked."""

import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.machinery import PathFinder
from typing import Any, Literal, cast, get_args

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.policy import POLICY_FIELDS, Policy
from oncely.locations import LedgerPlace, absolute, check_shared, check_shared_transport
from oncely.spark.option_values import (
    check_consumer,
    choice,
    refuse_unknown,
    required,
    unknown,
    whole_number,
)
from oncely.spark.settings import as_names
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import check_transactions

Handler = Callable[[Message], Any]
Mode = Literal["leased", "transactional", "rows"]

_DEFAULT_CHUNK = 1_000
_DEFAULT_CHUNK_OF_ROWS = 5_000
_TABLE = re.compile(r"(?:[^\W\d]\w*\.)?[^\W\d]\w*")
_FIXED = ("on_outage", "on_missing_id")


@dataclass(frozen=True)
class SinkOptions:
    """What `format("oncely")` was told, checked; travels to the executors."""

    mode: Mode
    consumer: str
    ledger: str = field(repr=False)
    """A ledger's URL, or env:NAME or file:PATH, read where the ledger is opened."""
    ledger_table: str
    ledger_schema: str | None
    handler: str
    """module:function; empty in mode `rows`, which calls none."""
    handler_path: str | None
    """A folder to import the handler from."""
    policy: Policy
    probe: str | None
    """module:function, the policy's `on_in_doubt` where that is a probe. The policy here travels
    without it: a function from `handler_path` can be imported only where that is known."""
    chunk: int
    """How many messages are claimed at once, at most."""
    quarantine: str
    """Where rows that are no message go, as Parquet."""
    since: float | None
    """Duplicates of what was first seen from then on (the store's clock, seconds since 1970) are
    counted as duplicates in the input; None: from the start of the task."""
    transport: str | None = field(repr=False)
    """What sends the messages that handlers send: a URL, env:NAME or file:PATH; None: a relay."""
    channel: str | None
    """host:port of the driver's channel."""
    channel_token: str
    """What the channel asks for; Spark masks options with such a name."""
    table: str | None
    """In mode `rows`: where the rows go, as "table" or "schema.table"."""
    archive: str | None
    """Where messages are looked up that are older than the retention: a folder, or a URI."""
    upsert: tuple[str, ...]
    """In mode `rows`: the columns of a key under which rows that are there are renewed."""
    report: str | None
    """The name under which a commit hands its counts over, on the driver's machine."""

    @property
    def place(self) -> LedgerPlace:
        """Where the ledger is."""
        return LedgerPlace(self.ledger, self.ledger_table, self.ledger_schema)

    def whole_policy(self) -> Policy:
        """The policy with its probe. Raises ConfigError where that cannot be imported."""
        if self.probe is None:
            return self.policy
        probe = import_function(self.probe, "on_in_doubt", self.handler_path)
        return replace(self.policy, on_in_doubt=probe)


_NAMES = {each.name for each in fields(SinkOptions)} - {"policy", "probe"} | set(POLICY_FIELDS)


def read_options(options: Mapping[str, str]) -> SinkOptions:
    """Check the options of the sink. Raises ConfigError, which names the option."""
    given = {name.lower(): value for name, value in options.items()}
    refuse_unknown(given, _NAMES)
    policy = read_policy(_policy_values(given), given.get("handler_path"))
    mode = cast(Mode, choice("mode", given.get("mode", "leased"), get_args(Mode)))
    _check_mode(mode, given, policy)
    transport = given.get("transport")
    return SinkOptions(
        mode=mode,
        consumer=check_consumer(required(given, "consumer", "billing")),
        ledger=check_ledger(required(given, "ledger", "sqlite:////var/lib/ledger.db"), mode),
        ledger_table=given.get("ledger_table", TABLE_NAME),
        ledger_schema=given.get("ledger_schema"),
        handler="" if mode == "rows" else required(given, "handler", "shop.billing:charge"),
        handler_path=given.get("handler_path"),
        policy=replace(policy, on_in_doubt="hold") if callable(policy.on_in_doubt) else policy,
        probe=given["on_in_doubt"] if callable(policy.on_in_doubt) else None,
        chunk=whole_number(
            given, "chunk", _DEFAULT_CHUNK_OF_ROWS if mode == "rows" else _DEFAULT_CHUNK
        ),
        quarantine=absolute(given.get("quarantine") or "oncely-quarantine"),
        since=float(given["since"]) if "since" in given else None,
        transport=None if transport is None else check_shared_transport(transport),
        channel=given.get("channel"),
        channel_token=given.get("channel_token", ""),
        table=_table(given) if mode == "rows" else None,
        archive=absolute(given["archive"]) if given.get("archive") else None,
        upsert=as_names(given.get("upsert", "")),
        report=given.get("report"),
    )


def _check_mode(mode: Mode, given: Mapping[str, str], policy: Policy) -> None:
    """Raise ConfigError for options that are another mode's."""
    if mode != "rows":
        for name in ("table", "upsert"):
            if name in given:
                raise ConfigError(
                    f'option {name}: mode {mode!r} writes no rows; write .option("mode", "rows")'
                )
    elif given.get("archive"):
        raise ConfigError('option archive: mode "rows" looks nothing up there; drop it')
    elif given.get("handler"):
        raise ConfigError('option handler: mode "rows" calls none; drop it, or write another mode')
    elif callable(policy.on_in_doubt):
        raise ConfigError(
            'on_in_doubt: mode "rows" has no message to ask a probe about; write "retry", "hold"'
            ' or "dead_letter"'
        )


def _table(given: Mapping[str, str]) -> str:
    table = required(given, "table", "payments")
    if not _TABLE.fullmatch(table):
        raise ConfigError(
            f'option table: {table!r} names no table; write "payments" or "public.payments"'
        )
    return table


def check_ledger(url: str, mode: Mode) -> str:
    """`url`, if a ledger there will do for `mode`. Raises ConfigError."""
    if mode == "transactional":
        try:
            check_transactions(url)
        except ConfigError as error:
            raise ConfigError(f'{error}, or write mode "leased"') from None
    return check_shared(url)


def read_policy(table: Mapping[str, Any], folder: str | None = None) -> Policy:
    """A policy that the sink can follow. Raises ConfigError, which names the field.

    `on_in_doubt` may be a probe, as "module:function", importable from `folder`.
    """
    for name in table.keys() - set(POLICY_FIELDS):
        raise ConfigError(unknown(name, POLICY_FIELDS))
    values = dict(table)
    if ":" in str(values.get("on_in_doubt")):
        values["on_in_doubt"] = import_function(values["on_in_doubt"], "on_in_doubt", folder)
    policy = Policy(**values)
    if policy.lease_s is None:
        raise ConfigError(
            'lease: the claim of a killed task would be waited for for ever; write "5m"'
        )
    for name in _FIXED:
        if getattr(policy, name) != getattr(Policy(), name):
            raise ConfigError(f"{name}: on Spark it is always {getattr(Policy(), name)!r}")
    return policy


def _policy_values(given: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {name: given[name] for name in POLICY_FIELDS if name in given}
    if "tries" in values:
        values["tries"] = whole_number(given, "tries", 0)
    if "backoff" in values:
        values["backoff"] = [delay.strip() for delay in values["backoff"].split(",")]
    return values


def import_function(name: str, what: str, folder: str | None = None) -> Callable[..., Any]:
    """The function that "module:function" names. Raises ConfigError, which starts with `what`."""
    if ":" not in name:
        raise ConfigError(f'{what}: {name!r} names no function; write "module:function"')
    if folder is not None:
        _prefer(folder, name.partition(":")[0].partition(".")[0])
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


def _prefer(folder: str, package: str) -> None:
    """Import `package` from `folder` where it is there, whatever was imported before."""
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    found = PathFinder.find_spec(package, [folder])
    loaded = sys.modules.get(package)
    # A folder without `__init__.py` has no file.
    file = getattr(loaded, "__file__", None)
    if found is not None and loaded is not None and file != found.origin:
        for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
            del sys.modules[name]
