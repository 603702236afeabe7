"""Overview: whether anything is stuck, and where to go from here."""

from starlette.responses import Response

from oncely import ops
from oncely.web import contents
from oncely.web.visit import Visit


def overview(visit: Visit) -> Response:
    """Where the ledger stands, and what went on in the last day."""
    return visit.page(
        "overview.html",
        **contents.overview(ops.overview(visit.ledger, visit.site.problems())),
        **contents.last_day(visit.ledger, visit.site.activity(), visit.ledger.now()),
        is_live=visit.query("refresh") != "off",
        command="oncely status --json",
    )
