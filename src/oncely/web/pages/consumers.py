"""Consumers: a row for each, how long its records are kept, and what it handled lately."""

from starlette.responses import Response

from oncely import ops
from oncely.web import contents
from oncely.web.visit import Visit


def consumers(visit: Visit) -> Response:
    """Every consumer that the ledger knows; as `oncely status --json` has it, and the rates as
    `oncely activity --json` has them.
    """
    return visit.page(
        "consumers.html",
        **contents.consumers(visit.ledger, ops.status(visit.ledger)),
        **contents.last_day(visit.ledger, visit.site.activity(), visit.ledger.now()),
        command="oncely status --json",
    )
