"""TLS to a server: what is wrong with a certificate, and what to write in the URL."""

import re
from pathlib import Path
from urllib.parse import parse_qsl

from oncely.core.errors import ConfigError

# By the kind of server: how its URLs name an authority's file, a client's files, and no TLS.
_WORDS = {
    "amqp": ("?cafile=FILE", "?certfile=FILE&keyfile=FILE", "amqp://"),
    "mysql": ("?ssl_ca=FILE", "?ssl_cert=FILE&ssl_key=FILE", "no ssl_ca"),
    "postgresql": ("?sslrootcert=FILE", "?sslcert=FILE&sslkey=FILE", "?sslmode=disable"),
    "redis": ("?ssl_ca_certs=FILE", "?ssl_certfile=FILE&ssl_keyfile=FILE", "redis://"),
}
_FILES = {name for words in _WORDS.values() for name in re.findall(r"(\w+)=FILE", str(words))}
# As OpenSSL, Python and the servers put them, the more certain ones first.
_REASONS = {
    r"mismatch, cert|does not match host": "the certificate is not for the name in the URL: "
    "write the name that it is for",
    r"has expired|not yet valid": "renew the server's certificate, or set this machine's clock",
    r"valid client cert|alert.(certificate|unknown.ca|bad.cert|handshake)|denied for user": "the "
    "server accepts this user only with another certificate or password: write {1}",
    r"certificate.verify.failed": "the server's certificate has expired, or its authority is not "
    "known here: write {0}",
    r"wrong.version.number|record.layer|support (it|ssl)|timeout connecting": "this port does not "
    "speak TLS: name the port that does, or write {2}",
    r"insecure transport|no encryption": "the server accepts only TLS: write {0}",
    # A server that refuses a client's certificate, or is stopping, may not come to say so.
    r"EOF occurred in violation": "the server ended TLS: it accepts only clients with a "
    "certificate: write {1}, or does not speak TLS: write {2}",
}


def advice(error: object, kind: str) -> str:
    """What to put after an error of connecting: where it is about TLS, what to write instead."""
    for reason, told in _REASONS.items():
        if kind in _WORDS and re.search(reason, f"{error}", re.IGNORECASE):
            return "; " + told.format(*_WORDS[kind])
    return ""


def check_files(options: str) -> None:
    """Raise ConfigError for the first file in the options of a URL that cannot be read."""
    for name, file in parse_qsl(options):
        try:
            if name in _FILES and file != "system":
                Path(file).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name}: {file!r} cannot be read: {error.strerror}") from error
