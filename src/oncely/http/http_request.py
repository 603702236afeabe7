"""A request of any framework, as `scope` and `fingerprint` functions get it."""

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from oncely.core.ids import fingerprint_of
from oncely.core.json_equality import equal_json
from oncely.http.answers import by_name
from oncely.http.problems import INCOMPLETE, Refused, too_large

PIECE = 64 * 1024
"""Bytes of a body that are read at a time."""
_DIGEST_BYTES = 16
# RFC 9110, 8.6. No body has more bytes than this many digits can say.
_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)


def content_length(length: str | None) -> int:
    """The length that a request says its body has; 0 if it says none. Raises Refused for a value
    that is not a length.
    """
    length = length or "0"
    if not _LENGTH.fullmatch(length):
        raise Refused(INCOMPLETE)
    return int(length)


class RequestBody:
    """A request's body of at most `most` bytes: up to `most_in_memory` in memory, else in a
    temporary file.

    `declared` is the length that the request says it has. Servers hand over a body that was cut off
    as if it were whole; some do so even where they say that it is.
    """

    def __init__(self, most_in_memory: int, most: int, declared: str | None) -> None:
        self._most_in_memory = most_in_memory
        self._most = most
        self._declared = content_length(declared) if declared else 0
        if self._declared > most:
            raise Refused(too_large(most))
        self.length = 0
        self.file: IO[bytes] = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - `close` closes it.
            max_size=most_in_memory
        )

    def write(self, piece: bytes) -> None:
        """Add a piece of the body. Raises Refused where it becomes too large."""
        self.length += len(piece)
        if self.length > self._most:
            raise Refused(too_large(self._most))
        self.file.write(piece)

    def check_whole(self) -> None:
        """Raise Refused where less has come than the request says."""
        if self.length < self._declared:
            raise Refused(INCOMPLETE)

    def pieces(self) -> Iterator[bytes]:
        """The whole body, from its beginning."""
        self.file.seek(0)
        while piece := self.file.read(PIECE):
            yield piece

    def whole(self) -> bytes:
        """The whole body."""
        self.file.seek(0)
        return self.file.read()

    def fingerprint(self) -> str:
        """Equal for bodies that are equal as JSON, or as bytes; a body in a file only as bytes."""
        if self.length <= self._most_in_memory:
            return fingerprint_of(equal_json(self.whole()))
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()

    def close(self) -> None:
        """Discard the body."""
        self.file.close()


class HttpRequest:
    """A request with its body read.

    Any other attribute is looked up in the framework's own place: an outer middleware sets
    `request.user_id` in the state (ASGI), in the environ (WSGI) or on the request (Django).
    """

    def __init__(
        self,
        *,
        method: str,
        path: str,
        query: str,
        fields: Sequence[tuple[str, str]],
        body: RequestBody,
        native: Any,
        look_up: Callable[[str], Any],
    ) -> None:
        self.method = method
        self.path = path
        """The decoded path, from the root of the server."""
        self.query = query
        """The query as the client wrote it, without the question mark."""
        self.fields = fields
        """The header fields in their order, each a name and a value."""
        self.native = native
        """The scope (ASGI), the environ (WSGI) or the request (Django)."""
        self._body = body
        self._look_up = look_up

    @property
    def body(self) -> bytes:
        """The whole body."""
        return self._body.whole()

    @property
    def headers(self) -> Mapping[str, str]:
        """The header fields by their names, in lower case; those of one name joined by commas."""
        return by_name(self.fields)

    def values_of(self, name: str) -> Sequence[str]:
        """The value of each field of that name."""
        wanted = name.lower()
        return [value for field, value in self.fields if field.lower() == wanted]

    def fingerprint(self) -> str:
        """A fingerprint of method, path, query and body."""
        parts = (self.method, self.path, self.query, self._body.fingerprint())
        return fingerprint_of("\0".join(parts).encode("utf-8", "surrogateescape"))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._look_up(name)
        except (LookupError, AttributeError):
            raise AttributeError(
                f"the request has no {name!r}: let a middleware outside of this one put it into "
                "the request's state (ASGI), into the environ (WSGI) or on the request (Django)"
            ) from None
