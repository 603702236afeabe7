"""What every request passes: who asks, and whether a change is meant by them."""

import inspect
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from oncely.web.access import COOKIE, FIELD, header, is_from_elsewhere, parts_of
from oncely.web.site import Site
from oncely.web.visit import Visit

LOOKING = ("GET", "HEAD")
_STATIC = "/static/"
MAX_BYTES = 8 * 2**20
"""A body of 1 MiB may be three times as long in a form, where each byte is a %XX."""
_MAX_FIELDS = 4_000
_KIND = "application/x-www-form-urlencoded"


class Gate:
    """Lets through who may look; and of changes, those of operators that were sent from our own
    pages.
    """

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app = app
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            refusal = await self._refusal(scope, receive)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        site = self._site
        visit = Visit(site, Request(scope, receive))
        # The name that was asked, without a port; empty for what is not a name.
        host = parts_of(f"//{header(scope, 'host') or ''}").hostname or ""
        if site.hosts is not None and host not in site.hosts:
            # A page of another site, whose name was made to point here, could read all of this.
            return visit.refusal(421, f"Ask by one of these names: {', '.join(site.hosts)}.")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.startswith(_STATIC) and scope["method"] in LOOKING:
            return None
        if site.auth is not None:
            found = site.auth(scope)
            scope["oncely.user"] = await found if inspect.isawaitable(found) else found
            if visit.user is None:
                return visit.refusal(403, "You are not signed in, or may not look at this.")
        return None if scope["method"] in LOOKING else await self._refused_change(visit)

    async def _refused_change(self, visit: Visit) -> Response | None:
        request = visit.request
        if not visit.may_change:
            return visit.refusal(403, "Only operators may change anything; nothing was changed.")
        if is_from_elsewhere(request.scope):
            return visit.refusal(
                403,
                "This form was not sent from a page of this site, or a proxy in between changes "
                "the header Host; nothing was changed.",
            )
        try:
            form = await read_form(request)
        except HTTPException as error:
            return visit.refusal(error.status_code, f"{error.detail}; nothing was changed.")
        request.scope["oncely.form"] = form
        cookie = request.cookies.get(COOKIE, "")
        if not self._site.tokens.is_right(visit.field(FIELD), cookie, visit.user):
            return visit.refusal(
                403,
                "This form is too old; go back, reload the page and send it again. "
                "Nothing was changed.",
            )
        return None


async def read_form(request: Request) -> Mapping[str, Sequence[str]]:
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
