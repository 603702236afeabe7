"""The dashboard as an ASGI app."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from oncely import ops
from oncely.core.errors import (
    ConfigError,
    ContentionError,
    MessageError,
    OncelyError,
    RefusedError,
    StoreUnavailable,
    mask_passwords,
    told,
)
from oncely.core.policy import Probe
from oncely.ledger.ledger import Ledger
from oncely.web.access import Auth, FormTokens, ProxyAuth, TrustedProxies
from oncely.web.gate import Gate
from oncely.web.pages import letters, lists, records, workers
from oncely.web.rendering import STATIC, environment
from oncely.web.safety_headers import SafetyHeaders
from oncely.web.site import (
    ACTIVITY_FOR_S,
    PAGES_FOR_S,
    PROBLEMS_FOR_S,
    Mask,
    Remembered,
    SharedPages,
    Site,
)
from oncely.web.visit import Visit

_Page = Callable[[Visit], Response]
_Endpoint = Callable[[Request], Response]

_PAGES: Mapping[str, _Page] = {
    "/": lists.overview,
    "/consumers": lists.consumers,
    "/failed": letters.letters,
    "/letter": letters.letter,
    "/in-doubt": lists.in_doubt,
    "/waiting": lists.waiting,
    "/outbox": lists.outbox,
    "/queues": lists.queues,
    "/messages": records.search,
    "/message": records.message,
    "/workers": workers.workers,
    "/runs": lists.runs,
    "/audit": lists.audit,
}
_CHANGES: Mapping[str, _Page] = {
    "/letters/confirm": letters.LETTER_PAGES.confirm,
    "/letters/change": letters.LETTER_PAGES.change,
    "/letters/edit": letters.edit,
    "/records/confirm": records.RECORD_PAGES.confirm,
    "/records/change": records.RECORD_PAGES.change,
    "/waiting/confirm": records.RETRY_PAGES.confirm,
    "/waiting/change": records.RETRY_PAGES.change,
    "/workers/confirm": workers.WORKER_PAGES.confirm,
    "/workers/change": workers.WORKER_PAGES.change,
    "/unsent/confirm": letters.UNSENT_PAGES.confirm,
    "/unsent/change": letters.UNSENT_PAGES.change,
}
_STATUSES: Mapping[type[OncelyError], int] = {
    ConfigError: 400,
    MessageError: 400,
    RefusedError: 404,
    StoreUnavailable: 503,
    ContentionError: 503,
}


def dashboard(
    ledger: Ledger,
    *,
    auth: Auth | None = None,
    mask: Mask = lambda message: message,
    name: str = "",
    secret: str | None = None,
    hosts: Collection[str] | None = None,
    probes: Mapping[str, Probe] | None = None,
    proxies: Iterable[str] | None = None,
) -> ASGIApp:
    """The dashboard of a ledger, as an ASGI app that can be mounted in any other.

    `auth` says who asks, and what they may do; without it everybody may look and nobody change
    anything. `mask` gives a message as people may see it. `name` says which ledger it is; a
    password in it is masked. Where several processes answer under one address they need the same
    `secret`. `hosts` are the only names by which it may be asked, where there are such. `probes`
    are functions by consumer, as a policy's `on_in_doubt`: operators may have one asked about a
    message in doubt. `proxies` are the addresses or networks of those whose `X-Forwarded-Proto` is
    believed, so that the cookie is for TLS alone where browsers use it: those that a `ProxyAuth`
    trusts, else this machine, where none are named.
    """
    if proxies is not None:
        trusted = TrustedProxies(proxies)
    else:
        trusted = auth.proxies if isinstance(auth, ProxyAuth) else TrustedProxies()
    site = Site(
        ledger,
        auth,
        mask,
        mask_passwords(name),
        FormTokens(secret),
        hosts,
        trusted,
        {} if probes is None else probes,
        Remembered(partial(ops.problems, ledger, program="reader"), PROBLEMS_FOR_S),
        Remembered(partial(ops.activity, ledger), ACTIVITY_FOR_S),
        SharedPages(PAGES_FOR_S),
    )
    routes = [
        *(Route(path, _shown(site, page), methods=["GET"]) for path, page in _PAGES.items()),
        Route("/failed/export", lambda each: letters.export(Visit(site, each)), methods=["GET"]),
        *(Route(path, _changed(site, page), methods=["POST"]) for path, page in _CHANGES.items()),
        *(Route(f"{path}/", _without_slash(site, path)) for path in _PAGES if path != "/"),
        Mount("/static", _KeptFiles(directory=STATIC)),
    ]

    for template in environment().list_templates():
        # Compiled before anybody asks: the first page would take that much longer.
        environment().get_template(template)

    def wrong(request: Request, error: Exception) -> Response:
        return _told(Visit(site, request), error)

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, site=site)],
        exception_handlers={OncelyError: wrong, HTTPException: wrong, 500: wrong},
    )
    app.router.redirect_slashes = False
    return SafetyHeaders(app)


def _without_slash(site: Site, path: str) -> _Endpoint:
    """To the page at `path`. Starlette's own redirect names the scheme and the host, and where a
    proxy is in front, those are other ones.
    """

    def endpoint(request: Request) -> Response:
        return RedirectResponse(Visit(site, request).link(path, **request.query_params))

    return endpoint


# None of these is a coroutine: so each is run in a thread, and may wait for the store.


def _shown(site: Site, page: _Page) -> _Endpoint:
    return lambda request: Visit(site, request).shared(page)


def _changed(site: Site, page: _Page) -> _Endpoint:
    def endpoint(request: Request) -> Response:
        try:
            return page(Visit(site, request))
        finally:
            # Also where it failed: a part of the change may be done.
            site.pages.forget()

    return endpoint


def _told(visit: Visit, error: Exception) -> Response:
    """What is wrong, in words."""
    match error:
        case HTTPException():
            return visit.refusal(error.status_code, error.detail)
        case StoreUnavailable() | ContentionError():
            text = f"The ledger cannot be reached: {error}"
        case OncelyError():
            text = str(error)
        case _:
            # The server's log has it; it may hold what is in a message.
            text = "This page failed; see the log of the server."
    kinds = [status for kind, status in _STATUSES.items() if isinstance(error, kind)]
    return visit.refusal(kinds[0] if kinds else 500, told(error, text))


class _KeptFiles(StaticFiles):
    """Files that browsers may keep: each address has a part that changes with the content."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response
