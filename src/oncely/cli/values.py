"""Types of arguments and options: a wrong value is told in one line, when it is parsed."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

from oncely.core.durations import lease_seconds, positive_seconds, seconds
from oncely.core.errors import ConfigError, MessageError
from oncely.core.ids import check_id
from oncely.core.state_words import state_word

_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
_PORT = re.compile(r"[0-9]{1,5}")
_LAST_PORT = 65_535
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9_.~-]*)+")


class Value(click.ParamType[Any]):
    """A value that a function makes of the name of the option and the text that was typed.

    The function raises ConfigError. In help, `name` stands for the value, in capitals.
    """

    def __init__(self, name: str, read: Callable[[str, str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,  # noqa: ARG002 - the option says enough.
    ) -> Any:
        """The value; one that is a default already is returned as it is."""
        if not isinstance(value, str) or param is None:
            return value
        is_option = isinstance(param, click.Option)
        where = param.opts[0] if is_option else param.human_readable_name.strip("[].")
        return self._read(where, value)


def folders(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What a shell completes: folders only."""
    return [CompletionItem(incomplete, type="dir")]


def _name(where: str, text: str, what: str) -> str:
    """A message id or, if `what` says so, the name of a consumer."""
    try:
        return check_id(text, what)
    except MessageError as error:
        raise ConfigError(f"{where}: {error}; no record can have it") from error


def _duration(where: str, text: str) -> str:
    seconds(text, where)
    return text


def _lease(_: str, text: str) -> str:
    lease_seconds(text)
    return text


def _number(where: str, text: str, digits: int, what: str) -> int:
    """A whole number from 1, of so many digits at most."""
    if not re.fullmatch(rf"[1-9][0-9]{{0,{digits - 1}}}", text):
        raise ConfigError(f"{where}: {text!r} is not {what}")
    return int(text)


def _header(where: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f'{where}: {text!r} is not a header; write "NAME=VALUE"')
    return name, value


def _root_path(where: str, text: str) -> str:
    """The path below which a site is served: /oncely; empty for /."""
    path = text.rstrip("/")
    if text != "/" and not _ROOT_PATH.fullmatch(path):
        raise ConfigError(f"{where}: {text!r} is not a path of a URL; write /oncely")
    return path


def _pause(where: str, text: str) -> float:
    """Seconds, from a number of them or a duration."""
    if _SECONDS.fullmatch(text):
        text = f"{text}s"
    return positive_seconds(text, where, "never come to an end of looking; write 2")


def _for_consumer(where: str, text: str, example: str) -> tuple[str, str]:
    """A consumer, and what is said for it: billing=90d."""
    # A consumer's name may hold an equals sign; a duration or a function's name never does.
    consumer, equals, value = text.rpartition("=")
    if not equals:
        raise ConfigError(f'{where}: {text!r} names no consumer; write "billing={example}"')
    return _name(where, consumer, "consumer"), value


def _retention(where: str, text: str) -> tuple[str, str]:
    consumer, kept = _for_consumer(where, text, "90d")
    return consumer, _duration(where, kept)


def state(words: Sequence[str]) -> Value:
    """A state of records that is one of these words."""

    def read(where: str, text: str) -> str:
        word = state_word(text, where)
        if word not in words:
            raise ConfigError(f"{where}: {text!r} is none of {', '.join(words)}")
        return word

    return Value("state", read)


def port(example: int) -> Value:
    """The number of a port; 0 for any."""

    def read(where: str, text: str) -> int:
        if not _PORT.fullmatch(text) or int(text) > _LAST_PORT:
            raise ConfigError(f"{where}: {text!r} is not a port: write {example}, or 0 for any")
        return int(text)

    return Value("port", read)


MESSAGE_ID = Value("id", partial(_name, what="id"))
CONSUMER = Value("name", partial(_name, what="consumer"))
TEXT = Value("text", partial(_name, what="text"))
"""A part of a message id."""
TIME = Value("time", _duration)
"""Text such as 12h."""
LEASE = Value("time", _lease)
"""A length of time, or none."""
NUMBER = Value("n", partial(_number, digits=9, what="a whole number from 1 to 999999999"))
_IS_LETTER = "the number of a dead letter; type: oncely dead list"
LETTER = Value("id", partial(_number, digits=18, what=_IS_LETTER))
HEADER = Value("name=value", _header)
ROOT_PATH = Value("path", _root_path)
PAUSE = Value("seconds", _pause)
RETENTION = Value("consumer=time", _retention)
PROBE = Value("consumer=module:function", partial(_for_consumer, example="module:function"))
FILE = click.Path()
