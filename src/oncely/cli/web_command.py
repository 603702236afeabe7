"""Serves the dashboard of `oncely web`, until it is stopped."""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Collection
from contextlib import closing
from errno import EADDRNOTAVAIL
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from oncely._util.signals import end_at_once, on_signals
from oncely.cli.loading import load_probe
from oncely.cli.opening import opened
from oncely.cli.web import WebOptions
from oncely.core.errors import ConfigError
from oncely.web import Auth, ProxyAuth, dashboard
from oncely.web.proxies import THIS_MACHINE

_LOCAL = ("localhost", "127.0.0.1", "::1")
_GRACE_S = 5
"""For what is being answered when it is stopped."""
_LOOK_S = 0.5
_KEPT_S = 75
"""How long a connection without a request is kept: longer than browsers and proxies pause between
two, who else send one into a connection that is just being closed.
"""


def serve(parsed: WebOptions) -> None:
    """Serve it until SIGINT or SIGTERM."""
    auth = _auth(parsed)
    probes = {consumer: load_probe(name) for consumer, name in parsed.probe}
    with opened(parsed.ledger) as ledger:
        # Before anything is served: the schema may be an old one.
        ledger.of_message("oncely")
        hosts = _hosts(parsed.host, auth)
        app = dashboard(
            ledger,
            auth=auth,
            name=parsed.ledger.url or "",
            hosts=hosts,
            probes=probes,
            proxies=parsed.trusted_proxy or None,
        )
        with closing(_listening(parsed.host, parsed.port)) as listening:
            _say(parsed, listening)
            _serve(_below(parsed.root_path, app), listening)


def _auth(parsed: WebOptions) -> Auth | None:
    """Who asks, as it was typed how to find out. Raises ConfigError where that is half said."""
    if parsed.user_header is None:
        if parsed.operator:
            raise ConfigError("web: --operator needs --user-header NAME")
        if parsed.trusted_proxy:
            raise ConfigError("web: --trusted-proxy needs --user-header NAME")
        return None
    trusted = parsed.trusted_proxy or THIS_MACHINE
    return ProxyAuth(parsed.user_header, trusted=trusted, operators=parsed.operator)


def _hosts(host: str, auth: Auth | None) -> Collection[str] | None:
    """By which names it may be asked. Raises ConfigError where strangers could ask."""
    if auth is not None:
        return None
    if not _is_local(host):
        raise ConfigError(
            f"web: others can reach {host}, and nobody is asked who they are; add "
            "--user-header NAME behind a proxy"
        )
    return {*_LOCAL, host}


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


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


def _say(parsed: WebOptions, listening: socket.socket) -> None:
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{parsed.root_path}/"
    print(json.dumps({"url": url}) if parsed.json else f"oncely: the dashboard is at {url}")
    sys.stdout.flush()


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
        access_log=False,
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
