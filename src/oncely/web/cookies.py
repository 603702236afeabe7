"""Cookies of the dashboard: for its own pages, out of scripts' reach."""

from typing import Literal

from starlette.responses import Response

from oncely.web.proxies import TrustedProxies
from oncely.web.users import Scope


def set_cookie(
    response: Response,
    scope: Scope,
    proxies: TrustedProxies,
    name: str,
    value: str,
    samesite: Literal["lax", "strict"],
) -> None:
    """Give the browser a cookie, which it sends over TLS alone if it asks over TLS, here or at a
    proxy.
    """
    response.set_cookie(
        name,
        value,
        path=scope.get("root_path", "").rstrip("/") or "/",
        httponly=True,
        samesite=samesite,
        secure=scope["scheme"] == "https" or proxies.is_secure(scope),
    )
