"""What stands behind an option, checked at the door: each raises ConfigError for what cannot be."""

import re
from collections.abc import Callable

from oncely.core.errors import ConfigError, MessageError
from oncely.core.message import check_id
from oncely.core.policy import lease_seconds, seconds

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


def name(where: str, what: str) -> Callable[[str], str]:
    """For what a record can have as its id or, as `what` says, as its consumer."""

    def checked(text: str) -> str:
        try:
            return check_id(text, what)
        except MessageError as error:
            raise ConfigError(f"{where}: {error}; no record can have it") from error

    return checked


def duration(where: str) -> Callable[[str], str]:
    """For a length of time, such as 12h."""

    def checked(text: str) -> str:
        seconds(text, where)
        return text

    return checked


def lease(text: str) -> str:
    """A length of time, or none."""
    lease_seconds(text)
    return text


def number(where: str) -> Callable[[str], int]:
    """For a whole number from 1."""

    def read(text: str) -> int:
        if not _NUMBER.fullmatch(text):
            raise ConfigError(f"{where}: {text!r} is no whole number from 1 to 999999999")
        return int(text)

    return read


def retention(text: str) -> tuple[str, str]:
    """A consumer and how long its records are kept: billing=90d."""
    # A consumer's name may hold an equals sign; a duration never does.
    consumer, equals, kept = text.rpartition("=")
    if not equals:
        raise ConfigError(f'--retention: {text!r} names no consumer; write "billing=90d"')
    return name("--retention", "consumer")(consumer), duration("--retention")(kept)
