"""Asking a command that is at work over HTTP."""

from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen


class Got(NamedTuple):
    """An answer."""

    status: int
    text: str


def got(url: str) -> Got:
    """What it answers, whatever its status."""
    try:
        with urlopen(url, timeout=60) as answer:
            return Got(answer.status, answer.read().decode())
    except HTTPError as refused:
        with refused:
            return Got(refused.code, refused.read().decode())
