"""Waiting: what has failed and is tried again by itself, and when."""

from starlette.responses import Response

from oncely.web import contents
from oncely.web.decisions import WAITING
from oncely.web.pages.listing import command, more_of
from oncely.web.visit import Visit


def waiting(visit: Visit) -> Response:
    """Those of a consumer, or of all."""
    shown = contents.waiting(visit.ledger, visit.consumer, visit.limit, visit.ledger.now())
    return visit.page(
        "waiting.html",
        **shown,
        more_link=more_of(visit, shown["more"]),
        decisions=WAITING.values(),
        command=command("waiting", visit),
    )
