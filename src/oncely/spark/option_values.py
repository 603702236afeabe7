"""The values of options: from Spark's strings, checked, where errors name the option; and from a
program as Spark's strings, where its own values win over the session's `spark.oncely.*`.
"""

import pkgutil
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from oncely.core.errors import ConfigError, MessageError
from oncely.core.ids import check_id

T = TypeVar("T")

_SPARKS_OWN = frozenset({"checkpointlocation", "path", "queryname", "outputmode"})
"""Spark's own options for every format."""
_PREFIX = "spark.oncely."
_QUOTED = re.compile(r"`((?:[^`]|``)+)`")
_DURATIONS = ("backoff", "lease")
"""The options whose numbers are seconds."""


def unknown(name: str, known: Iterable[str], kind: str = "key") -> str:
    """The error text for an unknown name, with the nearest known one."""
    near = get_close_matches(name, list(known), n=1)
    return f"{name}: there is no such {kind}" + (f"; did you mean {near[0]!r}?" if near else "")


def refuse_unknown(given: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError for an unknown name."""
    for name in given:
        # Spark passes its own settings, too; those have a dot.
        if "." not in name and name not in known and name not in _SPARKS_OWN:
            raise ConfigError(f"option {unknown(name, known)}")


def required(given: Mapping[str, str], name: str, example: str) -> str:
    """A required option. Raises ConfigError with an example if it is missing."""
    if not given.get(name):
        raise ConfigError(f'option {name}: missing; write .option("{name}", "{example}")')
    return given[name]


def choice(name: str, value: str, offered: Iterable[T]) -> T:
    """`value`, if it is one of `offered`. Raises ConfigError."""
    for each in offered:
        if each == value:
            return each
    words = ", ".join(f'"{each}"' for each in offered)
    raise ConfigError(f"option {name}: {value!r} is not offered; write one of {words}")


def check_consumer(name: str) -> str:
    """`name`, if a consumer can have it. Raises ConfigError."""
    try:
        return check_id(name, "consumer")
    except MessageError as error:
        raise ConfigError(f"option consumer: {error}") from error


def share(given: Mapping[str, str], name: str) -> float | None:
    """An option that is a share; None if it is not set. Raises ConfigError."""
    if name not in given:
        return None
    try:
        value = float(given[name])
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"option {name}: {given[name]!r} is not a share; write one such as 0.5")
    return value


def whole_number(given: Mapping[str, str], name: str, default: int) -> int:
    """An option that counts something. Raises ConfigError for less than 1."""
    text = given.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}: {text!r} is not a whole number of 1 or more")
    return int(text)


# ---- As Spark's strings ------------------------------------------------------------------------


def sink_options(spark: SparkSession, **options: Any) -> dict[str, str]:
    """Options for `format("oncely")`: the session's `spark.oncely.*`, overridden by `options`.

    Code on the executors sees its options, not the session. Values may be the types of `Policy`
    (lists, timedelta), and functions that can be imported by name; None leaves an option to the
    session. Raises ConfigError for a function that workers cannot import.
    """
    settings = {
        name.removeprefix(_PREFIX): value
        for name, value in spark.conf.getAll.items()
        # A name with a further dot belongs to another format.
        if name.startswith(_PREFIX) and "." not in name.removeprefix(_PREFIX)
    }
    return settings | as_text(options)


def as_text(options: dict[str, Any]) -> dict[str, str]:
    """Options as Spark's strings, without those that are None. Raises ConfigError."""
    given = {name: value for name, value in options.items() if value is not None}
    texts = {name: _as_text(name, value) for name, value in given.items()}
    for folder in (_folder_of(value) for value in given.values() if callable(value)):
        if folder is not None:
            texts.setdefault("handler_path", folder)
    return texts


def as_names(text: str) -> tuple[str, ...]:
    """The names in an option with several, as `as_text` writes them."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def quoted(name: str) -> str:
    """A column's name quoted for Spark SQL, with any characters."""
    return f"`{name.replace('`', '``')}`"


def unquoted(expression: str) -> str:
    """The name inside of an expression in backticks, else the expression itself."""
    found = _QUOTED.fullmatch(expression.strip())
    return expression if found is None else found[1].replace("``", "`")


def _as_text(name: str, value: Any) -> str:
    if callable(value):
        return _name_of(value, name)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, timedelta):
        return f"{value.total_seconds()}s"
    if isinstance(value, int | float) and name in _DURATIONS:
        return f"{value}s"
    if isinstance(value, list | tuple):
        return ",".join(_as_text(name, each) for each in value)
    return str(value)


def _name_of(function: Callable[..., Any], what: str) -> str:
    """The "module:function" by which a worker imports `function`."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    try:
        found = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError):
        found = None
    if module == "__main__" or found is not function:
        raise ConfigError(
            f"{what}: {name or function!r} of {module} cannot be imported by a worker; define it "
            'at the top level of a module of its own, or write "module:function"'
        )
    return f"{module}:{name}"


def _folder_of(function: Callable[..., Any]) -> str | None:
    """The folder of a function's module, if workers do not look there by themselves."""
    name = function.__module__
    module = sys.modules[name]
    if module.__file__ is None:
        return None
    above = name.count(".") + hasattr(module, "__path__")
    folder = str(Path(module.__file__).absolute().parents[above])
    return None if folder in sysconfig.get_paths().values() else folder
