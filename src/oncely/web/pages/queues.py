"""Queues: what programs have put into queues of the ledger."""

from starlette.responses import Response

from oncely import ops
from oncely.web import contents
from oncely.web.visit import Visit


def queues(visit: Visit) -> Response:
    """Each with how much waits in it; as `oncely status --json` has it under `queues`."""
    shown = contents.queues(ops.backlogs(visit.ledger))
    return visit.page("queues.html", **shown, command="oncely status --json")
