"""Flask: the request's state as `g.oncely`."""

from typing import Any

from flask import g, request, request_started

from oncely.http.wsgi import STATE


def show_in_g() -> None:
    """From now on, `g.oncely` is the request's state that the middleware has put into the environ.
    Calling it again changes nothing.
    """
    request_started.connect(_show)


def _show(_: Any, **__: Any) -> None:
    if STATE in request.environ:
        g.oncely = request.environ[STATE]
