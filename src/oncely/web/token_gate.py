"""The token that `oncely web` prints: whoever knows it may look and decide, as with Jupyter."""

import hmac
import re
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Send

from oncely.web.access import Role, Scope, TrustedProxies, User, header
from oncely.web.gate import LOOKING
from oncely.web.rendering import render
from oncely.web.safety_headers import SafetyHeaders

FIELD = "token"
_COOKIE = "oncely_web_token_"
_CHALLENGE = {"www-authenticate": 'Bearer realm="oncely"'}


def token_holder(_: Scope) -> User:
    """Who asks, behind a `TokenGate`: nobody knows more than that they have the token."""
    return User("token holder", Role.OPERATOR)


class TokenGate:
    """Passes on to `app` what is asked with the token, and refuses everything else alike.

    A browser brings the token once in the address, and from then on in a cookie; a program brings
    it as `Authorization: Bearer TOKEN`.
    """

    def __init__(self, app: ASGIApp, token: str, proxies: TrustedProxies) -> None:
        self._app = app
        self._token = token.encode()
        self._proxies = proxies
        # Made once: to refuse a request costs next to nothing.
        self._refusal = HTMLResponse(render("no_token.html", {}), 401, _CHALLENGE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, let its browser in, or refuse it."""
        answer = self._answer(Request(scope))
        await (self._app if answer is None else SafetyHeaders(answer))(scope, receive, send)

    def _answer(self, request: Request) -> Response | None:
        in_address = request.query_params.get(FIELD, "")
        if request.method in LOOKING and self._is_right(in_address):
            return self._let_in(request)
        in_cookie = request.cookies.get(_cookie(request), "")
        kind, _, bearer = (header(request.scope, "authorization") or "").partition(" ")
        is_right = kind.lower() == "bearer" and self._is_right(bearer.strip())
        return None if is_right or self._is_right(in_cookie) else self._refusal

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token)

    def _let_in(self, request: Request) -> Response:
        """To the same address without the token: it is not to stay in the browser's history."""
        fields = request.query_params.multi_items()
        query = urlencode([(name, value) for name, value in fields if name != FIELD])
        # Two slashes at the beginning would lead to another site.
        path = quote("/" + request.scope["path"].lstrip("/"))
        response = RedirectResponse(f"{path}?{query}" if query else path, 303)
        # Not "strict": then a link in a mail would lead to the refusal. Forms have another cookie.
        token = self._token.decode()
        self._proxies.set_cookie(response, request.scope, _cookie(request), token, "lax")
        return response


def _cookie(request: Request) -> str:
    """The cookie's name. It has the host, the port and the path in it: a browser shares the cookies
    of a machine among all its ports.
    """
    where = request.headers.get("host", "") + request.scope.get("root_path", "")
    return _COOKIE + re.sub("[^A-Za-z0-9]", "-", where)
