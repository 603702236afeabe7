"""TLS to a server: what is wrong with a certificate, and what to write in the URL."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from oncely.core.errors import ConfigError


class TlsWords(NamedTuple):
    """How the URLs for a driver speak of TLS."""

    ca: str
    """The option with the file of the authority that has signed the server's certificate."""
    client: str
    """The options with the certificate and the key that a client shows."""
    plain: str
    """What to write for a server without TLS."""


# The reasons as OpenSSL, Python and the servers put them, the more certain ones first.
_REASONS = [
    (
        r"(hostname|ip address) mismatch|does not match host name",
        "the server's certificate is for another name than the URL's: write the name that is in it",
    ),
    (
        r"has expired|is not yet valid",
        "the server's certificate is not valid now: renew it there, or set the clock here",
    ),
    (
        r"valid client certificate|alert[ _](certificate|unknown[ _]ca|bad[ _]cert|handshake)",
        "the server accepts only clients that show a certificate it trusts: write {client}",
    ),
    (
        r"certificate[ _]verify[ _]failed",
        "the server's certificate has expired, or its authority is not known here: write {ca}",
    ),
    (
        r"wrong[ _]version[ _]number|record[ _]layer[ _]failure|doesn't support it|not support ssl",
        "there is no TLS at this port: name the port that has it, or write {plain}",
    ),
    (
        r"access denied for user",
        "the password is wrong, or the server accepts this user only with TLS: write {client}",
    ),
    (
        r"insecure transport|no encryption",
        "the server accepts only connections with TLS: write {ca}",
    ),
]


# When the server refuses a client's certificate, its reason may be lost with the connection. A
# server that is stopping ends TLS in the same way.
_ENDED_BY = r"eof occurred in violation of protocol"
_ENDED = (
    "the server ended TLS: it accepts only clients with a certificate it trusts: write {client}, "
    "or has no TLS at this port: write {plain}"
)


def advice(error: str, words: TlsWords, *, is_connecting: bool = False) -> str:
    """What to put after the text of an error: where that is about TLS, what to write instead."""
    for pattern, told in [*_REASONS, *([(_ENDED_BY, _ENDED)] if is_connecting else [])]:
        if re.search(pattern, error, re.IGNORECASE):
            return f"; {told.format_map(words._asdict())}"
    return ""


def check_files(files: Mapping[str, str]) -> None:
    """Raise ConfigError for the first of these options whose file cannot be read."""
    for name, file in files.items():
        try:
            Path(file).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name}: {file!r} cannot be read: {error.strerror}") from error
