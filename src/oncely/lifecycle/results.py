"""Results: how what a function returns is kept as JSON, and given back as it was."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from inspect import isabstract, unwrap
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Protocol, Union, cast, get_args, get_origin, get_type_hints
from uuid import UUID

from oncely._util.event_log import EventLog
from oncely.core.errors import ConfigError
from oncely.core.json_body import no_constant
from oncely.core.record import Key
from oncely.lifecycle.wrapping import name_of

_log = EventLog(__name__)

_encode = json.JSONEncoder(allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=no_constant).decode


class Serializer(Protocol):
    """Makes JSON of results, and the results of it. The module json is one."""

    def dumps(self, value: Any, /) -> str:
        """`value` as the text of JSON. Raises an error of any kind where it cannot be kept."""

    def loads(self, text: str, /) -> Any:
        """The value again."""


KeepResult = bool | type[Any] | UnionType | Serializer
"""Whether results are kept; or as what type, where no annotation names it; or by what."""


def kept(serializer: Serializer, result: Any, key: Key) -> Any:
    """`result` as JSON. Where it cannot be kept, that is logged, and it is None: its handler has
    succeeded all the same.
    """
    if result is None:
        return None
    try:
        return _decode(serializer.dumps(result))
    except Exception as error:  # noqa: BLE001 - a user's serializer may raise anything.
        _log.warning(
            "the result of message '%(message_id)s' of '%(consumer)s' cannot be kept: %(reason)s; "
            "a duplicate gets None",
            error=error,
            extra={"event": "result_not_kept", **key._asdict()},
        )
        return None


def given_back(serializer: Serializer, json_value: Any, key: Key) -> Any:
    """The result that was kept so; None where it cannot be read any more, which is logged."""
    if json_value is None:
        return None
    try:
        return serializer.loads(json.dumps(json_value))
    except Exception as error:  # noqa: BLE001 - the same.
        _log.warning(
            "the kept result of message '%(message_id)s' of '%(consumer)s' cannot be read: "
            "%(reason)s; a duplicate gets None",
            error=error,
            extra={"event": "result_unreadable", **key._asdict()},
        )
        return None


def serializer_of(function: Callable[..., Any] | None, keep_result: KeepResult) -> Serializer:
    """What keeps the results of `function`. Raises ConfigError for a type that cannot be kept."""
    if hasattr(keep_result, "dumps") and hasattr(keep_result, "loads"):
        return cast(Serializer, keep_result)
    try:
        return ByType(_annotated(function) if isinstance(keep_result, bool) else keep_result)
    except TypeError as error:
        what = "a result" if function is None else f"the result of {name_of(function)}"
        raise ConfigError(
            f"keep_result: {what} cannot be kept as JSON: {error}; return a dataclass, or write "
            "keep_result= with an object that has dumps and loads"
        ) from None


def _annotated(function: Any) -> Any:
    """The type that a function returns, as far as its annotation can be read."""
    if function is None:
        return None
    if isinstance(function, partial):
        return _annotated(function.func)
    function = unwrap(function if hasattr(function, "__globals__") else type(function).__call__)
    # Only this one: a parameter's type may be known to type checkers alone.
    annotation = {"return": getattr(function, "__annotations__", {}).get("return")}
    with suppress(Exception):
        hints = SimpleNamespace(__annotations__=annotation)
        return get_type_hints(hints, getattr(function, "__globals__", {})).get("return")
    return None


# ---- JSON by types -----------------------------------------------------------------------------

_TEXTS: Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    # Every datetime is a date.
    "oncely:datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "oncely:date": (date, date.isoformat, date.fromisoformat),
    "oncely:time": (time, time.isoformat, time.fromisoformat),
    "oncely:microseconds": (
        timedelta,
        lambda value: str(value // timedelta(microseconds=1)),
        lambda text: timedelta(microseconds=int(text)),
    ),
    "oncely:decimal": (Decimal, str, Decimal),
    "oncely:uuid": (UUID, str, UUID),
    "oncely:bytes": (bytes, bytes.hex, bytes.fromhex),
}
"""Values that are kept as an object with one name, which tells their type: each with its two ways.
"""
_AS_IS = "oncely:as_is"
_PLAIN: tuple[type, ...] = (
    str,
    int,
    float,
    NoneType,
    dict,
    list,
    *(kind for kind, _, _ in _TEXTS.values()),
)


class ByType:
    """Keeps JSON, dates and times, Decimal, UUID and bytes, and where `hint` names their types,
    tuples, enums, dataclasses and models of pydantic. Raises TypeError for a type that it cannot
    keep.
    """

    def __init__(self, hint: Any = None) -> None:
        self._read = _reader(hint)

    def dumps(self, value: Any) -> str:
        """As Serializer: raises TypeError where `value` would come back as another one."""
        typed: list[Any] = []
        try:
            text = _encode(value)
        except TypeError:
            text = json.dumps(value, allow_nan=False, default=partial(_shown, typed))
        if self._read is not _same or typed:
            with suppress(Exception):
                if self.loads(text) == value:
                    return text
        if typed:
            kind = type(typed[0]).__qualname__
            raise TypeError(f"a {kind} comes back only where the annotation names it")
        # Names are looked at one by one only where something comes back as another value.
        if '"oncely:' in text or json.loads(text) != value:
            _check_names(value)
        if self._read is _same:
            return text
        # JSON of another type than was annotated, and the tuple that comes back as a list.
        return f'{{"{_AS_IS}": {text}}}'

    def loads(self, text: str) -> Any:
        """As Serializer."""
        value = json.loads(text, object_hook=_untagged)
        if isinstance(value, dict) and [*value] == [_AS_IS]:
            return value[_AS_IS]
        return self._read(value)


def _shown(typed: list[Any], value: Any) -> Any:
    """`value`, which JSON does not know, as JSON; and in `typed` if JSON does not tell its type."""
    for name, (kind, write, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {name: write(value)}
    typed.append(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value) if each.init}
    if hasattr(type(value), "model_validate"):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


def _check_names(value: Any) -> None:
    """Raises TypeError for a dict in JSON's own types that would come back as another value."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            for name in each:
                if not isinstance(name, str):
                    raise TypeError(f"{name!r} is a key, and JSON has only text as keys")
            if len(each) == 1 and (name in _TEXTS or name == _AS_IS):
                raise TypeError(f"{name!r} as the only key is oncely's own")
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each


def _untagged(names: dict[str, Any]) -> Any:
    if len(names) == 1 and (name := next(iter(names))) in _TEXTS:
        return _TEXTS[name][2](names[name])
    return names


def _same(value: Any) -> Any:
    return value


def _reader(hint: Any) -> Callable[[Any], Any]:
    """What makes a value of the type `hint` of JSON. Raises TypeError for other types."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return _reader(arguments[0])
    if kind in (Union, UnionType):
        # Plain JSON last: it reads anything.
        readers = [_reader(each) for each in arguments if each is not NoneType]
        if all(read is _same for read in readers):
            return _same
        return partial(_first_of, sorted(readers, key=lambda read: read is _same))
    if not isinstance(kind, type) or kind in (Any, object):
        return _same
    if issubclass(kind, Enum):
        return kind
    if is_dataclass(kind):
        # Its fields are looked up only then: a tree has a field of its own type.
        return lambda value: kind(
            **{name: _field_readers(kind)[name](each) for name, each in value.items()}
        )
    if hasattr(kind, "model_validate"):
        return cast(Callable[[Any], Any], kind.model_validate)
    return _reader_of_many(kind, arguments)


def _reader_of_many(kind: type, arguments: Sequence[Any]) -> Callable[[Any], Any]:
    inner = [_reader(each) for each in arguments if each is not ...]
    if issubclass(kind, tuple):
        if not inner:
            return getattr(kind, "_make", tuple)
        is_open = ... in arguments

        def tuple_of(value: Any) -> Any:
            readers = inner * len(value) if is_open else inner
            return tuple(read(each) for read, each in zip(readers, value, strict=True))

        return tuple_of
    if issubclass(kind, Mapping) and arguments and not _is_text(arguments[0]):
        raise TypeError(f"{kind.__qualname__} has no JSON form with keys that are not text")
    if all(read is _same for read in inner) and (isabstract(kind) or issubclass(kind, _PLAIN)):
        return _same
    if issubclass(kind, Mapping):
        return lambda value: {inner[0](name): inner[-1](each) for name, each in value.items()}
    if isabstract(kind) or issubclass(kind, list):
        return lambda value: [inner[0](each) for each in value]
    raise TypeError(f"{kind.__qualname__} has no JSON form")


def _is_text(hint: Any) -> bool:
    """Whether keys of this type may be text; those of a union are looked at when there are some."""
    return not isinstance(hint, type) or hint in (Any, object) or issubclass(hint, str)


def _first_of(readers: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    if value is None:
        return None
    for read in readers[:-1]:
        with suppress(Exception):
            return read(value)
    return readers[-1](value)


@cache
def _field_readers(kind: type) -> Mapping[str, Callable[[Any], Any]]:
    return {name: _reader(hint) for name, hint in get_type_hints(kind).items()}


JSON = ByType()
"""For results of which no type is known."""
