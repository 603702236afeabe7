"""A page that somebody asks for: what they sent, what they may do, and how they are answered."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlencode

from markupsafe import escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from oncely import ops
from oncely.core.errors import ConfigError, OncelyError
from oncely.core.ids import check_text
from oncely.core.shown import shown
from oncely.ledger.ledger import Ledger
from oncely.web import contents
from oncely.web.access import COOKIE, User
from oncely.web.contents import LIMIT
from oncely.web.rendering import render
from oncely.web.site import Site

MOST = 1_000
"""Rows of a list, at most."""
_NAME, _TOKEN = secrets.token_hex(16), secrets.token_hex(16)
"""What stands in a page that is shared where each visitor's own are filled in. Nobody can know
them, so that no text of others has them in it.
"""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request to one site."""

    site: Site
    request: Request
    is_shared: bool = False
    """Whether the page is made for all who ask for the same, and not for one of them."""

    @property
    def ledger(self) -> Ledger:
        """What is looked at."""
        return self.site.ledger

    @property
    def user(self) -> User | None:
        """Who asks, where anybody was asked who they are."""
        user = cast("User | None", self.request.scope.get("oncely.user"))
        return user and user._replace(name=_NAME) if self.is_shared else user

    @property
    def may_change(self) -> bool:
        """Whether they may do more than look."""
        return self.user is not None and self.user.may_change

    @property
    def by(self) -> str:
        """Under whose name a change is noted."""
        return "" if self.user is None else self.user.name

    def query(self, name: str) -> str | None:
        """A value of the address; None where it is missing or empty."""
        return self.request.query_params.get(name) or None

    @property
    def consumer(self) -> str | None:
        """The one whose messages are asked for; None for all. Raises MessageError for what no
        database can look for.
        """
        name = self.query("consumer")
        return None if name is None else check_text(name, "consumer")

    @property
    def limit(self) -> int:
        """How many rows to show."""
        text = self.query("limit") or str(LIMIT)
        is_short = text.isascii() and text.isdigit() and len(text) <= len(str(MOST))
        if not is_short or not 1 <= int(text) <= MOST:
            raise ConfigError(f"limit: {text!r} is not a whole number from 1 to {MOST:,}")
        return int(text)

    def _tab_counts(self) -> Mapping[str, int]:
        """What each tab counts; nothing where the ledger cannot tell. Not counted for each page: of
        a large ledger that takes longer than most pages.
        """
        try:
            found = self.site.pages("status", lambda: ops.status(self.ledger), times=10)
            return contents.tab_counts(found)
        except OncelyError:
            return {}

    def sent(self, name: str) -> Sequence[str]:
        """The values of a field of the form."""
        form: Mapping[str, Sequence[str]] = self.request.scope["oncely.form"]
        return form.get(name, [])

    def field(self, name: str) -> str:
        """The value of a field of the form; empty where it is missing."""
        return next(iter(self.sent(name)), "")

    def link(self, path: str, /, **query: object) -> str:
        """The address of a page of this site, wherever it is mounted."""
        asked = urlencode({name: value for name, value in query.items() if value not in (None, "")})
        root = self.request.scope.get("root_path", "").rstrip("/")
        return f"{root}{path}{'?' if asked else ''}{asked}"

    def here(self, /, **changed: object) -> str:
        """The address of this page, asked for otherwise."""
        root = self.request.scope.get("root_path", "").rstrip("/")
        path = self.request.scope["path"].removeprefix(root)
        return self.link(path, **{**self.request.query_params, **changed})

    def shared(self, make: "Callable[[Visit], Response]") -> Response:
        """The page that `make` gives, or gave just before to somebody who asked for the same and
        has the same role: at most two seconds old, and made after the last change made here.
        """
        scope, role = self.request.scope, self.user and self.user.role
        query = self.request.query_params.multi_items()
        asked = (scope.get("root_path"), scope["path"], *query, role)
        page = self.site.pages(asked, lambda: make(replace(self, is_shared=True)))
        return self._own(bytes(page.body), page.status_code)

    def page(self, template: str, status: int = 200, **context: Any) -> Response:
        """A page of the site."""
        known: Mapping[str, Any] = {
            "visit": self,
            "csrf": _TOKEN,
            "tab_counts": {} if "tab_counts" in context else self._tab_counts(),
            "command": None,
            "heading": "h2",
            "at_once": MOST,
        }
        html = render(template, {**known, **context}).encode()
        return HTMLResponse(html, status) if self.is_shared else self._own(html, status)

    def _own(self, html: bytes, status: int) -> Response:
        """A page with this visitor's name and token in it."""
        cookie = self.request.cookies.get(COOKIE, "")
        is_new = self.may_change and not cookie
        if is_new:
            cookie = secrets.token_urlsafe(32)
        token = self.site.tokens.token(cookie, self.user)
        html = html.replace(_TOKEN.encode(), token.encode())
        html = html.replace(_NAME.encode(), escape(shown(self.by)).encode())
        response = HTMLResponse(html, status)
        if is_new:
            self.site.proxies.set_cookie(response, self.request.scope, COOKIE, cookie, "strict")
        return response

    def refusal(self, status: int, text: str) -> Response:
        """A page that says why there is no other."""
        return self.page("refusal.html", status, text=text, tab_counts={})
