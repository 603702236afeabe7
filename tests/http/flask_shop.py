"""The shop behind gunicorn, with Flask."""

import os
from pathlib import Path
from typing import Any

import flask

from oncely.http import WsgiIdempotencyKey, github, webhook
from oncely.ledger.ledger import open_ledger

application = flask.Flask("shop")
_ledger = open_ledger(os.environ["SHOP_LEDGER"])
_hook = webhook(_ledger, queue="hooks", verify=github("secret"))


@application.post("/orders")
def order() -> Any:
    """Take an order."""
    with Path(os.environ["SHOP_EFFECTS"]).open("ab", buffering=0) as file:
        file.write(f"{flask.request.json['number']}\n".encode())
    return flask.jsonify({"by": os.getpid()}), 201


@application.post("/hooks")
def hooks() -> Any:
    """Take a delivery of GitHub, by the endpoint's function."""
    asked = flask.request
    answer = _hook.receive(asked.method, dict(asked.headers), asked.get_data())
    return answer.body, answer.status, [*answer.fields]


application.wsgi_app = WsgiIdempotencyKey(  # type: ignore[method-assign]
    application.wsgi_app, _ledger, consumer="shop"
)
