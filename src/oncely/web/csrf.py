"""Forms that other sites make a browser send: told from our own."""

import hmac
import secrets
from urllib.parse import SplitResult, urlsplit

from oncely.web.users import Scope, User, header

COOKIE = "oncely_web"
FIELD = "csrf"


class FormTokens:
    """What each form carries: a digest of the browser's cookie and of the user.

    Several processes behind one address need the same `secret`; one of a process is drawn.
    """

    def __init__(self, secret: str | None) -> None:
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
