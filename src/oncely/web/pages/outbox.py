"""Outbox: what handlers have sent, and a relay has not published yet."""

from starlette.responses import Response

from oncely import ops
from oncely.web import contents
from oncely.web.decisions import UNSENT
from oncely.web.visit import Visit


def outbox(visit: Visit) -> Response:
    """What waits and what was refused, by destination."""
    return visit.page(
        "outbox.html",
        **contents.outbox(visit.ledger, ops.backlogs(visit.ledger), visit.ledger.now()),
        decisions=UNSENT.values(),
        command="oncely outbox status --json",
    )
