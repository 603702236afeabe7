"""GitHub's webhooks: each delivery is stored once, and handled once."""

import os

from starlette.applications import Starlette
from starlette.routing import Route

import oncely
from oncely.http import github, webhook

url = os.environ["ONCELY_LEDGER"]  # set by: . ./oncely.env
ledger = oncely.open_ledger(url)
endpoint = webhook(ledger, queue="github", verify=github(os.environ["WEBHOOK_SECRET"]))
app = Starlette(routes=[Route("/hooks/github", endpoint)])
consumer = oncely.Consumer(url, queue="github").idempotent(ledger, "github-events")


@consumer.handler
def handle(message: oncely.Message) -> None:
    """What must not happen twice. If it raises, the message is retried."""
    print(f"handling {message.type} {message.id}: {message.get('action')}")
