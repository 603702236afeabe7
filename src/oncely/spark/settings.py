"""Options for the sink from a program: its own values, over the session's `spark.oncely.*`."""

import pkgutil
import re
import sys
import sysconfig
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from oncely.core.errors import ConfigError

_PREFIX = "spark.oncely."
_QUOTED = re.compile(r"`((?:[^`]|``)+)`")
_DURATIONS = ("backoff", "lease")
"""Of which numbers are seconds."""


def sink_options(spark: SparkSession, **options: Any) -> dict[str, str]:
    """Options for `format("oncely")`: the session's `spark.oncely.*` and, over them, `options`.

    Code on the executors sees its options and no session. Values may be what `Policy` takes
    (lists, timedelta), and functions that can be imported by name; None leaves an option to the
    session. Raises ConfigError for a function that no worker can import.
    """
    settings = {
        name.removeprefix(_PREFIX): value
        for name, value in spark.conf.getAll.items()
        # A name with a further dot belongs to another format.
        if name.startswith(_PREFIX) and "." not in name.removeprefix(_PREFIX)
    }
    return settings | as_text(options)


def as_text(options: dict[str, Any]) -> dict[str, str]:
    """Options as Spark carries them, those that are None left out. Raises ConfigError."""
    given = {name: value for name, value in options.items() if value is not None}
    texts = {name: _as_text(name, value) for name, value in given.items()}
    for folder in (_folder_of(value) for value in given.values() if callable(value)):
        if folder is not None:
            texts.setdefault("handler_path", folder)
    return texts


def as_names(text: str) -> tuple[str, ...]:
    """The names in an option that holds several, as `as_text` writes them."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def quoted(name: str) -> str:
    """A column's name as Spark SQL has it where it may have any characters."""
    return f"`{name.replace('`', '``')}`"


def unquoted(expression: str) -> str:
    """The name that an expression is in backticks, else the expression itself."""
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
    if module == "__main__" or _find(f"{module}:{name}") is not function:
        raise ConfigError(
            f"{what}: {name or function!r} of {module} cannot be imported by a worker; define it "
            'at the top level of a module of its own, or write "module:function"'
        )
    return f"{module}:{name}"


def _find(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def _folder_of(function: Callable[..., Any]) -> str | None:
    """The folder that a function's module came from, where workers do not look by themselves."""
    name = function.__module__
    module = sys.modules[name]
    if module.__file__ is None:
        return None
    above = name.count(".") + hasattr(module, "__path__")
    folder = str(Path(module.__file__).absolute().parents[above])
    return None if folder in sysconfig.get_paths().values() else folder
