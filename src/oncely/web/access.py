"""Who looks at the dashboard, and what they may do; the proxies in front that tell in headers who
asks, and by which scheme; and forms that other sites make a browser send, told from our own.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from enum import StrEnum
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from starlette.responses import Response

from oncely.core.errors import ConfigError

EVERYBODY = "*"
THIS_MACHINE = ("127.0.0.1", "::1")
_SCHEME = "x-forwarded-proto"
COOKIE = "oncely_web"
FIELD = "csrf"


class Role(StrEnum):
    """What somebody may do."""

    VIEWER = "viewer"
    OPERATOR = "operator"


class User(NamedTuple):
    """Somebody who has said who they are."""

    name: str
    role: Role = Role.VIEWER

    @property
    def may_change(self) -> bool:
        """Whether they may do more than look."""
        return self.role is Role.OPERATOR


Scope = MutableMapping[str, Any]
"""An ASGI scope: what a server knows of a request before its body."""

Auth = Callable[[Scope], "User | Awaitable[User | None] | None"]
"""Says who asks; None for nobody who may look."""


def header(scope: Scope, name: str) -> str | None:
    """A header of the request; None where it is not there, or there more than once."""
    wanted = name.lower().encode("latin-1")
    found = [value for each, value in scope["headers"] if each.lower() == wanted]
    return found[0].decode("latin-1") if len(found) == 1 else None


class TrustedProxies:
    """The peers whose headers are believed: addresses or networks such as 10.0.0.0/8. Raises
    ConfigError for what is not one.
    """

    def __init__(self, trusted: Iterable[str] = THIS_MACHINE) -> None:
        try:
            self._networks = [ip_network(each) for each in trusted]
        except ValueError as error:
            raise ConfigError(
                f"trusted: {error}; write an address such as 10.0.0.7 or 10.0.0.0/8"
            ) from error

    def sent(self, scope: Scope) -> bool:
        """Whether one of them sends this request."""
        client = scope.get("client")
        try:
            peer = ip_address(client[0] if client else "")
        except ValueError:
            return False
        if isinstance(peer, IPv6Address):
            peer = peer.ipv4_mapped or peer  # A server on IPv6 sees ::ffff:10.0.0.7.
        return any(peer in network for network in self._networks)

    def is_secure(self, scope: Scope) -> bool:
        """Whether one of them says that a browser asks it over TLS."""
        # Of several proxies in a row, the first is the one that browsers reach.
        scheme = (header(scope, _SCHEME) or "").partition(",")[0].strip()
        return scheme.lower() == "https" and self.sent(scope)

    def set_cookie(
        self,
        response: Response,
        scope: Scope,
        name: str,
        value: str,
        samesite: Literal["lax", "strict"],
    ) -> None:
        """Give the browser a cookie for our own pages, out of scripts' reach; it sends it over TLS
        alone if it asks over TLS, here or at a proxy.
        """
        response.set_cookie(
            name,
            value,
            path=scope.get("root_path", "").rstrip("/") or "/",
            httponly=True,
            samesite=samesite,
            secure=scope["scheme"] == "https" or self.is_secure(scope),
        )


class ProxyAuth:
    """Whom the proxy names in `user_header` may come in.

    The header is believed of the peers that are `trusted` alone, addresses or networks such as
    10.0.0.0/8: whoever else can reach the dashboard could write it. Those named in `operators` may
    change things, `*` for all; the others may look. Raises ConfigError for what is not an address.
    """

    def __init__(
        self,
        user_header: str,
        *,
        trusted: Iterable[str] = THIS_MACHINE,
        operators: Collection[str] = (),
    ) -> None:
        self._header = user_header
        self._operators = operators
        self.proxies = TrustedProxies(trusted)

    def __call__(self, scope: Scope) -> User | None:
        """Who asks."""
        name = (header(scope, self._header) or "").strip()
        if not name or not self.proxies.sent(scope):
            return None
        is_operator = name in self._operators or EVERYBODY in self._operators
        return User(name, Role.OPERATOR if is_operator else Role.VIEWER)


class FormTokens:
    """What each form carries: a digest of the browser's cookie and of the user.

    Several processes behind one address need the same `secret`; one of a process is drawn. Raises
    ConfigError for a blank one.
    """

    def __init__(self, secret: str | None) -> None:
        if secret is not None and not secret.strip():
            raise ConfigError("secret: it is empty; write the output of: openssl rand -hex 32")
        self._secret = secrets.token_bytes(32) if secret is None else secret.encode()

    def token(self, cookie: str, user: User | None) -> str:
        """What a form carries that goes to this user's browser."""
        name = "" if user is None else user.name
        return hmac.digest(self._secret, f"{cookie}\0{name}".encode(), "sha256").hex()

    def is_right(self, token: str, cookie: str, user: User | None) -> bool:
        """Whether a form with this token was made here, for this user's browser."""
        return bool(cookie) and hmac.compare_digest(
            self.token(cookie, user).encode(), token.encode()
        )


def is_from_elsewhere(scope: Scope) -> bool:
    """Whether a browser says that a page of another site sends this, or does not say of which."""
    site = header(scope, "sec-fetch-site")
    if site is not None and site != "same-origin":
        return True
    origin = header(scope, "origin")
    if origin is None:
        # Not a browser: those that are too old to say where a form is from are not supported.
        return site is None
    return parts_of(origin).netloc.lower() != (header(scope, "host") or "").lower()


def parts_of(url: str) -> SplitResult:
    """The parts of a URL that a browser, or whoever, has sent; empty ones of what is not a URL."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
