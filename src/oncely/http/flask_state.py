"""Flask: the request's state as `g.oncely`."""

from typing import Any

from flask import g, request, request_started

from oncely.http.wsgi import STATE


def show_in_g() -> None:
    """From now on, Flask's `g` has what a middleware around the application has put into the
    environ. To call it again changes nothing.
    """
    request_started.connect(_show)


def _show(_: Any, **__: Any) -> None:
    if STATE in request.environ:
        g.oncely = request.environ[STATE]
