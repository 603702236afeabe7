"""Every error that oncely raises, and how an error is put into words for a record.

Errors after which a later call may succeed (StoreError, TransportError, BusyError) share no parent
below OncelyError with errors that need somebody's help (ConfigError, MessageError, RefusedError):
no `except` clause takes one kind for the other.
"""

import re
import traceback
from collections.abc import Collection, Mapping, Set
from typing import Any

NAMES = frozenset({"message_id", "consumer", "key", "destination", "queue"})
"""Fields that name a message, and are never masked: it would not be found by another name."""

# Bodies of a megabyte are searched: no pattern may look at a letter from each place before it.
_TOKEN = re.compile(r"\S+")
_USER_IN_URL = re.compile(r"\w://[^\s/:@]*:")
# A password may stand where a text was cut off: then no @ comes after it.
_PASSWORD_AT_END = re.compile(r"(\w://[^\s/:@]*):[^\s/@]+$")
# In quotes, which may themselves stand in quotes, a value may have blanks.
_QUOTED = r"""\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?"""
_ASSIGNED = r"\\*[\"']?\s*[=:]\s*\\*"
_PASSWORD_IN_TEXT = re.compile(
    rf"((?:password|passwd|pwd|secret|token|api[_-]?key){_ASSIGNED})"
    rf"({_QUOTED}|[^\s\"',;&}}]+)",
    re.IGNORECASE,
)
# Of these header fields the value is a secret to the end of the line.
_CREDENTIALS = re.compile(
    rf"((?:authorization|cookie){_ASSIGNED})({_QUOTED}|[^\r\n]+)", re.IGNORECASE
)
# "Basic" is a word, too: what follows it in a header is not all in small letters.
_SCHEME = re.compile(
    r"\b([Bb]earer|BEARER|(?:[Bb]asic|BASIC)(?=\s+[a-z]*[A-Z0-9+/=]))(\s+)[\w.~+/=-]+"
)


class OncelyError(Exception):
    """The parent of every error that oncely raises."""


class ConfigError(OncelyError):
    """A setting is wrong. The text says what, where, and what to type instead."""


class MessageError(OncelyError):
    """A message is unusable: its id, or its body when that is asked for as JSON."""


class StoreError(OncelyError):
    """The store could not do what was asked."""


class StoreUnavailable(StoreError):
    """The store cannot be reached, or stayed locked beyond its busy timeout."""


class ReplyLost(StoreUnavailable):
    """The connection broke while something was being written: it may be stored, or not.

    The ledger reads again and finds out; its callers never meet this error.
    """


class StoreDenied(StoreError):
    """The store's role or user lacks a privilege: asking again does not help. The text names what
    is missing, and what to type.
    """


class UnreadableRow(StoreError):
    """A row of the store is not as oncely, or a service that shares its table, writes it. The text
    names the row, and says what to type to mend it.
    """


class UnstorableMessage(StoreError):
    """The store refuses what is kept of this message, and takes others: a letter of its id that the
    database's encoding lacks, say. The text has the store's own words.
    """


class ContentionError(StoreError):
    """A record changed hands faster than it could be written; asking again is safe."""


class KeysLocked(ContentionError):
    """Another transaction holds locks on some keys, or on a table, for longer than the ledger
    waits; asking again is safe.

    A claim is answered with Busy instead.
    """

    def __init__(
        self, text: str, keys: Set[Any] = frozenset(), written: Set[Any] = frozenset()
    ) -> None:
        super().__init__(text)
        self.keys = keys
        """The keys that are locked. All others were processed."""
        self.written = written
        """The others of which the change is stored."""


class HandlerDied(OncelyError):
    """The process in which a handler ran has died, before the handler had ended."""


class EndedError(OncelyError):
    """The transaction of a handler ended before the handler did: the handler or the database has
    committed it or rolled it back, or it can only be rolled back.
    """

    is_undone = False
    """Whether it is known that nothing of the transaction is stored."""


class TransportError(OncelyError):
    """The broker could not do what was asked."""


class BrokerRefused(ConfigError):
    """The broker refuses, and would refuse again: a wrong password, or a queue that exists with
    another type. The text says what to change.
    """


class PublishRefused(TransportError):
    """The broker does not take some of the messages; all others are stored durably."""

    def __init__(self, refused: Mapping[int, str], passing: Collection[int] = ()) -> None:
        super().__init__(refused, passing)
        self.refused = refused
        """The place of each refused message among those given to `publish`, and the reason."""
        self.passing = passing
        """The places of those that the broker may accept later: their queue was full, say, or not
        available."""

    def __str__(self) -> str:
        index, reason = next(iter(self.refused.items()))
        return f"messages refused: {len(self.refused)}; message {index}: {reason}"


class FencedError(OncelyError):
    """The claim is not the newest of its record any more; nothing was written."""


class BusyError(OncelyError):
    """Another worker holds a live claim on this message: ask again later."""


class WaitingError(BusyError):
    """The message has failed, and waits in the ledger until a consumer tries it again."""


class RefusedError(OncelyError):
    """The state of the record does not allow what was asked. Waiting does not help: the record has
    to change first.
    """


class MismatchError(RefusedError):
    """The message id was seen before with another payload."""


class ExhaustedError(RefusedError):
    """The message has failed permanently; it runs again only if an operator lets it."""

    is_first = False
    """Whether this is the first answer that says so."""


class DuplicateError(RefusedError):
    """The message was processed before."""


class TooOldError(RefusedError):
    """The message is older than what the ledger remembers: it may have been processed."""


class InDoubtError(RefusedError):
    """An earlier claim ran out, and the policy does not let the message run again."""


def mask_passwords(text: str) -> str:
    """Replace what looks like a password by stars: in a URL, an assignment, or a header field."""
    if "://" in text:
        text = _PASSWORD_AT_END.sub(r"\1:***", _TOKEN.sub(_mask_url, text))
    text = _SCHEME.sub(r"\1\2***", text)
    for assignment in (_PASSWORD_IN_TEXT, _CREDENTIALS):
        text = assignment.sub(_mask_value, text)
    return text


def told(error: BaseException, text: str) -> str:
    """The `text` of an error, passwords masked; but for refusals, which only name messages."""
    return text if isinstance(error, RefusedError) else mask_passwords(text)


def is_secret(name: str) -> bool:
    """Whether the value of a header field, or of another one with this name, is a secret."""
    return mask_passwords(f"{name}=x") != f"{name}=x"


def _mask_value(found: re.Match[str]) -> str:
    quote = found[2][0] if found[2][0] in "\"'" else ""
    return f"{found[1]}{quote}***{quote}"


def _mask_url(found: re.Match[str]) -> str:
    # A password may hold what should have been escaped, so the last @ counts.
    before, at, host = found[0].rpartition("@")
    user = _USER_IN_URL.search(before)
    if user is None or user.end() == len(before):
        return found[0]
    return f"{before[: user.end()]}***{at}{host}"


def storable(text: str) -> str:
    """The text as every store can keep it: NUL and lone surrogates escaped."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def traced(error: BaseException, limit: int = 16_000) -> str:
    """As `describe`, with the traceback before the text; one that is too long keeps its end."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything.
        return describe(error)
    return describe(text[-limit:].rstrip(), limit)


def reason_of(error: BaseException, limit: int = 200) -> str:
    """The text of an error without its type: the reason why a message is set aside."""
    return describe(_text_of(error), limit) or "no reason given"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything.
        return "(its text cannot be shown)"


def describe(error: BaseException | str, limit: int = 2_000) -> str:
    """Put an error into words for a record: type and text, cut to `limit`, passwords masked.

    Never raises, whatever the error's own `__str__` does.
    """
    if isinstance(error, str):
        text = error
    else:
        text = f"{type(error).__name__}: {_text_of(error)}".removesuffix(": ")
    # Cut before masking: a text of many megabytes must not be searched.
    text = mask_passwords(text[: limit + 1])
    text = storable(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
