"""Serves the dashboard of `oncely web`, until it is stopped."""

import asyncio
import json
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from errno import EADDRNOTAVAIL

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from oncely._util.signals import end_at_once, on_signals
from oncely.cli.loading import load_probe
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName
from oncely.core.errors import ConfigError
from oncely.web import ProxyAuth, dashboard
from oncely.web.access import THIS_MACHINE, TrustedProxies
from oncely.web.token_gate import FIELD, TokenGate, token_holder

_VARIABLE = "ONCELY_WEB_TOKEN"
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,}")
"""A token of the user's: long enough that nobody guesses it, and as it is in an address."""
_GRACE_S = 5
"""For what is being answered when it is stopped."""
_LOOK_S = 0.5
_KEPT_S = 75
"""How long a connection without a request is kept: longer than browsers and proxies pause between
two, who else send one into a connection that is just being closed.
"""


def serve(
    at: LedgerName,
    *,
    host: str,
    port: int,
    root_path: str,
    user_header: str | None,
    trusted_proxy: Sequence[str],
    operator: Sequence[str],
    probe: Sequence[tuple[str, str]],
    as_json: bool,
) -> None:
    """Serve it until SIGINT or SIGTERM."""
    trusted = trusted_proxy or THIS_MACHINE
    if operator and user_header is None:
        raise ConfigError("web: --operator needs --user-header NAME")
    # Who asks, as a proxy says; where nobody says so a token is asked for instead.
    auth = None
    if user_header is not None:
        auth = ProxyAuth(user_header, trusted=trusted, operators=operator)
    token, query = _token() if auth is None else (None, "")
    probes = {consumer: load_probe(name) for consumer, name in probe}
    with opened(at) as ledger:
        # Before anything is served: the schema may be an old one.
        ledger.of_message("oncely")
        app = dashboard(
            ledger,
            auth=auth or token_holder,
            name=at.url or "",
            probes=probes,
            proxies=trusted,
        )
        if token is not None:
            app = TokenGate(app, token, TrustedProxies(trusted))
        with closing(_listening(host, port)) as listening:
            host, port = listening.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}{root_path}/{query}"
            print(json.dumps({"url": url}) if as_json else f"oncely: the dashboard is at {url}")
            sys.stdout.flush()
            _serve(_below(root_path, app), listening)


def _token() -> tuple[str, str]:
    """The token, and what the printed address says of it: all of a new token, which nobody knows
    yet; nothing of the user's own, because logs keep what a service prints. Raises ConfigError for
    a token that can be guessed.
    """
    token = os.environ.get(_VARIABLE)
    if token is None:
        token = secrets.token_urlsafe()
        return token, f"?{FIELD}={token}"
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"the value of {_VARIABLE} is not a token of at least 16 letters and digits "
            "(or - . _ ~); set it to what this prints: openssl rand -hex 32, or unset it"
        )
    return token, ""


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        advice = (
            "name an address of this machine with --host"
            if error.errno == EADDRNOTAVAIL
            else "name another with --port, or 0 for any that is free"
        )
        # Python adds the address, which stands before it here.
        reason = str(error.strerror).partition(" (while ")[0]
        raise ConfigError(f"web: {host}:{port} cannot be had ({reason}); {advice}") from error


def _below(root: str, app: ASGIApp) -> ASGIApp:
    """The app below a path, which a proxy in front may pass on, or cut off."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not f"{path}/".startswith(f"{root}/"):
            path = root + path
        elif path == root:
            path = f"{root}/"
        await app({**scope, "path": path, "root_path": root}, receive, send)

    return serve if root else app


def _serve(app: ASGIApp, listening: socket.socket) -> None:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        # It would show the token of an address.
        access_log=False,
        # The dashboard has no websockets.
        ws="none",
        server_header=False,
        # Who asks is the peer itself: ProxyAuth believes a trusted one alone.
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEPT_S,
    )
    server = uvicorn.Server(config)
    stop = threading.Event()

    def serve() -> None:
        try:
            asyncio.run(server.serve([listening]))
        finally:
            stop.set()

    # In a thread, so that signals stay ours.
    thread = threading.Thread(target=serve, name="oncely-web")
    with on_signals(stop.set, end_at_once):
        thread.start()
        # The signal may be handed to another thread, which does not wake this one to handle it.
        while not stop.wait(_LOOK_S):
            pass
        server.should_exit = True
        thread.join()
