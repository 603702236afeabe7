"""Unanswered: the errors of clients after which a request may have been carried out, or not.

Clients are known by name: none has to be installed.
"""

from typing import Any

_HTTPX = "ReadTimeout WriteTimeout ReadError WriteError RemoteProtocolError"
_CLIENTS = {
    # https://docs.python.org/3/library/exceptions.html#os-exceptions, and each module's own page
    "builtins": "TimeoutError ConnectionError -ConnectionRefusedError",
    "asyncio.exceptions": "IncompleteReadError",
    "http.client": "IncompleteRead",
    "smtplib": "SMTPServerDisconnected",
    "socket": "-gaierror",
    "ssl": "SSLEOFError SSLZeroReturnError -SSLCertVerificationError",
    "subprocess": "TimeoutExpired",
    "urllib.error": "-HTTPError ?URLError",
    # https://urllib3.readthedocs.io/en/stable/reference/urllib3.exceptions.html
    "urllib3.exceptions": "ReadTimeoutError ProtocolError -ConnectTimeoutError"
    " ?MaxRetryError ?SSLError",
    # https://requests.readthedocs.io/en/latest/api/#exceptions
    "requests.exceptions": "ReadTimeout ChunkedEncodingError -ConnectTimeout ?ConnectionError",
    # https://www.python-httpx.org/exceptions/
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    # https://docs.aiohttp.org/en/stable/client_reference.html#hierarchy-of-exceptions
    "aiohttp.client_exceptions": "ServerTimeoutError ServerDisconnectedError ClientPayloadError"
    " ClientOSError -ClientConnectorError -ConnectionTimeoutError",
    # https://github.com/boto/botocore/blob/develop/botocore/exceptions.py
    "botocore.exceptions": "HTTPClientError -ConnectionError",
    # https://docs.celeryq.dev/en/stable/userguide/workers.html#time-limits
    "billiard.exceptions": "SoftTimeLimitExceeded",
}
"""The classes of each module after which nobody knows. After those with a minus nothing was sent;
those with a question mark wrap another error, which decides. The class nearest to the error's own
counts: a refused connection is a ConnectionError, too."""


def _leaves_doubt(error: Any) -> bool | None:
    """Whether a request may have been carried out; None where the error is not listed."""
    for kind in type(error).__mro__:
        name, names = kind.__qualname__, _CLIENTS.get(kind.__module__, "").split()
        if name in names or f"-{name}" in names:
            return name in names
        if f"?{name}" in names:
            inner = getattr(error, "reason", None) or next(iter(error.args), None)
            return _leaves_doubt(inner) is not False
        if (kind.__module__, name) == ("grpc", "RpcError"):
            # https://grpc.github.io/grpc/core/md_doc_statuscodes.html
            code = getattr(error, "code", lambda: None)()
            return getattr(code, "name", None) in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
    return None


class _Listed(type):
    def __instancecheck__(cls, error: object) -> bool:
        return _leaves_doubt(error) is True


class Unanswered(Exception, metaclass=_Listed):
    """Stands for the timeouts and lost connections that Python and the common clients raise: what
    was asked for may have happened. For `Policy(in_doubt_on=...)`; nothing raises it.
    """
