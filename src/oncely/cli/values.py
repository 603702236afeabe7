"""Values of options, checked when they are parsed: each raises ConfigError for a wrong value."""

import re
from collections.abc import Sequence

from oncely import ops
from oncely.core.durations import lease_seconds, positive_seconds, seconds
from oncely.core.errors import ConfigError, MessageError
from oncely.core.ids import check_id

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_LETTER = re.compile(r"[1-9][0-9]{0,17}")
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
_PORT = re.compile(r"[0-9]{1,5}")
_LAST_PORT = 65_535
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9_.~-]*)+")


def name(where: str, what: str, text: str) -> str:
    """A message id or, if `what` says so, the name of a consumer."""
    try:
        return check_id(text, what)
    except MessageError as error:
        raise ConfigError(f"{where}: {error}; no record can have it") from error


def state(words: Sequence[str], text: str) -> str:
    """A state of records: one of these words."""
    word = ops.state_word(text, "--state")
    if word not in words:
        raise ConfigError(f"--state: {text!r} is none of {', '.join(words)}")
    return word


def duration(where: str, text: str) -> str:
    """A length of time, such as 12h."""
    seconds(text, where)
    return text


def lease(text: str) -> str:
    """A length of time, or none."""
    lease_seconds(text)
    return text


def number(where: str, text: str) -> int:
    """A whole number from 1."""
    if not _NUMBER.fullmatch(text):
        raise ConfigError(f"{where}: {text!r} is not a whole number from 1 to 999999999")
    return int(text)


def letter(text: str) -> int:
    """The number of a dead letter."""
    if not _LETTER.fullmatch(text):
        raise ConfigError(
            f"ID: {text!r} is not the number of a dead letter; type: oncely dead list"
        )
    return int(text)


def header(text: str) -> tuple[str, str]:
    """A header of a message: trace=on."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f'--header: {text!r} is not a header; write "NAME=VALUE"')
    return name, value


def port(where: str, example: int, text: str) -> int:
    """The number of a port; 0 for any."""
    if not _PORT.fullmatch(text) or int(text) > _LAST_PORT:
        raise ConfigError(f"{where}: {text!r} is not a port: write {example}, or 0 for any")
    return int(text)


def root_path(text: str) -> str:
    """The path below which a site is served: /oncely; empty for /."""
    path = text.rstrip("/")
    if text != "/" and not _ROOT_PATH.fullmatch(path):
        raise ConfigError(f"--root-path: {text!r} is not a path of a URL; write /oncely")
    return path


def pause(text: str) -> float:
    """Seconds between two counts, from a number of seconds or a duration."""
    if _SECONDS.fullmatch(text):
        text = f"{text}s"
    return positive_seconds(text, "--watch", "never come to an end of looking; write 2")


def retention(text: str) -> tuple[str, str]:
    """A consumer and how long its records are kept: billing=90d."""
    # A consumer's name may hold an equals sign; a duration never does.
    consumer, equals, kept = text.rpartition("=")
    if not equals:
        raise ConfigError(f'--retention: {text!r} names no consumer; write "billing=90d"')
    return name("--retention", "consumer", consumer), duration("--retention", kept)


def probe(text: str) -> tuple[str, str]:
    """A consumer and its probe: billing=app:asked_the_bank."""
    # A consumer's name may hold an equals sign; that of a function never does.
    consumer, equals, function = text.rpartition("=")
    if not equals:
        raise ConfigError(f'--probe: {text!r} names no consumer; write "billing=module:function"')
    return name("--probe", "consumer", consumer), function
