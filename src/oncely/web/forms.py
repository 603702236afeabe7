"""What a form sends, read within bounds."""

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request

MAX_BYTES = 8 * 2**20
"""A body of 1 MiB may be three times as long in a form, where each byte is a %XX."""
_MAX_FIELDS = 4_000
_KIND = "application/x-www-form-urlencoded"

Form = Mapping[str, Sequence[str]]


async def read_form(request: Request) -> Form:
    """The fields of the form that was sent. Raises HTTPException for what is not a form of ours."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _KIND:
        raise HTTPException(415, f"send a form as {_KIND}")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"the form is longer than {MAX_BYTES:,} bytes")
    try:
        return parse_qs(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError:
        raise HTTPException(400, "the form cannot be read") from None
