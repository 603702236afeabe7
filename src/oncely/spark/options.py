"""The options of the sink: from the strings that Spark carries to values, checked."""

import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, cast, get_args

from oncely.core.errors import ConfigError, MessageError
from oncely.core.message import Message, check_id
from oncely.core.policy import POLICY_FIELDS, Policy
from oncely.locations import check_shared

Handler = Callable[[Message], Any]
Mode = Literal["leased"]

_DEFAULT_CHUNK = 1_000
_NAMES = frozenset(
    {"chunk", "channel", "channel_token", "consumer", "handler", "handler_path", "ledger", "mode"}
    | {"quarantine", "since"}
    | set(POLICY_FIELDS)
)
_FIXED = ("on_outage", "on_missing_id", "on_too_old")
_SPARKS_OWN = frozenset({"checkpointlocation", "path", "queryname", "outputmode"})


@dataclass(frozen=True)
class SinkOptions:
    """What `format("oncely")` was told, checked; travels to the executors."""

    mode: Mode
    consumer: str
    ledger: str
    """A ledger's URL, or env:NAME or file:PATH, read where the ledger is opened."""
    handler: str
    """module:function"""
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
    channel: str | None
    """host:port of the driver's channel."""
    channel_token: str
    """What the channel asks for; Spark masks options with such a name."""

    def whole_policy(self) -> Policy:
        """The policy with its probe. Raises ConfigError where that cannot be imported."""
        if self.probe is None:
            return self.policy
        probe = import_function(self.probe, "on_in_doubt", self.handler_path)
        return replace(self.policy, on_in_doubt=probe)


def read_options(options: Mapping[str, str]) -> SinkOptions:
    """Check the options of the sink. Raises ConfigError, which names the option."""
    given = {name.lower(): value for name, value in options.items()}
    _refuse_unknown(given)
    policy = read_policy(_policy_values(given), given.get("handler_path"))
    return SinkOptions(
        mode=_mode(given.get("mode", "leased")),
        consumer=_consumer(_required(given, "consumer", "billing")),
        ledger=check_shared(_required(given, "ledger", "sqlite:////var/lib/ledger.db")),
        handler=_required(given, "handler", "shop.billing:charge"),
        handler_path=given.get("handler_path"),
        policy=replace(policy, on_in_doubt="hold") if callable(policy.on_in_doubt) else policy,
        probe=given["on_in_doubt"] if callable(policy.on_in_doubt) else None,
        chunk=_whole_number(given, "chunk", _DEFAULT_CHUNK),
        quarantine=_absolute(given.get("quarantine") or "oncely-quarantine"),
        since=float(given["since"]) if "since" in given else None,
        channel=given.get("channel"),
        channel_token=given.get("channel_token", ""),
    )


def _mode(mode: str) -> Mode:
    if mode not in get_args(Mode):
        modes = ", ".join(f'"{each}"' for each in get_args(Mode))
        raise ConfigError(f"option mode: {mode!r} is not offered; write one of {modes}")
    return cast(Mode, mode)


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
        values["tries"] = _whole_number(given, "tries", 0)
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
    if found is not None and loaded is not None and loaded.__file__ != found.origin:
        for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
            del sys.modules[name]


def unknown(name: str, known: Iterable[str], kind: str = "key") -> str:
    """Words for a name that is not known, with the one that may have been meant."""
    near = get_close_matches(name, list(known), n=1)
    return f"{name}: there is no such {kind}" + (f"; did you mean {near[0]!r}?" if near else "")


def _refuse_unknown(given: Mapping[str, str]) -> None:
    for name in given.keys() - _NAMES - _SPARKS_OWN:
        # Spark hands its own settings over too; those have a dot.
        if "." not in name:
            raise ConfigError(f"option {unknown(name, _NAMES)}")


def _required(given: Mapping[str, str], name: str, example: str) -> str:
    if not given.get(name):
        raise ConfigError(f'option {name}: missing; write .option("{name}", "{example}")')
    return given[name]


def _absolute(folder: str) -> str:
    return folder if "://" in folder else str(Path(folder).absolute())


def _consumer(name: str) -> str:
    try:
        return check_id(name, "consumer")
    except MessageError as error:
        raise ConfigError(f"option consumer: {error}") from error


def _whole_number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}: {text!r} is no whole number of 1 or more")
    return int(text)
