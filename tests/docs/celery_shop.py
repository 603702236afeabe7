"""The page's application in a worker's process: which release, and where, says the environment."""

import os
from collections.abc import Callable
from typing import Any

from celery import _state
from tests.docs.sections import Page
from tests.integration.adapting import Effects

RELEASE, BROKER, KEYS, LEDGER, FOLDER = (
    f"CELERY_SHOP_{name}" for name in ("RELEASE", "BROKER", "KEYS", "LEDGER", "FOLDER")
)


def application(environment: dict[str, str]) -> dict[str, Any]:
    """What the page defines for a release: `app`, `invoice` and, after the first, `ledger`."""
    effects = Effects(environment[FOLDER])

    def send_invoice(order_id: str) -> str:
        effects.add(order_id)
        return f"invoice {order_id}"

    places = {
        "sqlite:///shop.db": environment[LEDGER],
        "redis://localhost:6379/0": environment[KEYS],
        'broker="memory://", backend="cache+memory://"': (
            f'broker="{environment[BROKER]}",'
            f' backend="db+sqlite:///{environment[FOLDER]}/results.db", set_as_current=False'
        ),
    }
    # Every application that is made later would have the tasks of this one, too.
    finalizers = set(_state._on_app_finalizers)
    defined = _defined(Page("migrate-celery-once", places), environment[RELEASE], send_invoice)
    defined["app"].finalize()
    _state._on_app_finalizers.intersection_update(finalizers)
    return defined


def _defined(page: Page, release: str, send_invoice: Callable[[str], str]) -> dict[str, Any]:
    known = page.run("Before and after", {"__name__": "shop", "send_invoice": send_invoice}, 0)
    if release == "0":
        return page.run("Before and after", known, 1)
    known = page.run("Before and after", known, 2)
    if release == "1":
        return page.run("Release 1: both bases", known)
    return page.run("Before and after", known, 3)


if RELEASE in os.environ:
    app = application(dict(os.environ))["app"]
    app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
