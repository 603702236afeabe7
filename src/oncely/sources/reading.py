"""What the sources of this package share: errors of drivers, and messages made of headers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from oncely.core.errors import TransportError, describe
from oncely.core.message import Message
from oncely.sources import without_id

_FIELDS = {"type": "type", "source": "source", "content-type": "content_type", "key": "key"}
"""Fields of a message, by the headers that hold them."""


@contextmanager
def transport_errors(*kinds: type[Exception]) -> Iterator[None]:
    """In this block, errors of a driver become TransportErrors."""
    try:
        yield
    except kinds as error:
        raise TransportError(describe(error)) from error


def read_message(
    given_id: str, body: bytes, headers: Mapping[str, str], time: datetime | None, **known: Any
) -> Message:
    """A message whose sender may have written its id and other fields into headers, which come
    before `given_id` and what else is `known`. The headers were decoded with `errors="replace"`.
    """
    rest = dict(headers)
    said = {name: rest.pop(header) for header, name in _FIELDS.items() if header in rest}
    id_ = rest.pop("message-id", "") or given_id
    message = Message(id_, body, headers=rest, time=time, **(known | said))
    # Ids that differ would look the same.
    return without_id(message, "the message id is not UTF-8") if "\ufffd" in id_ else message
