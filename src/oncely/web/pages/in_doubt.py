"""In doubt: claims whose lease has run out, of which nobody knows whether the effect happened."""

from starlette.responses import Response

from oncely import ops
from oncely.web import contents
from oncely.web.decisions import RECORDS
from oncely.web.pages.listing import command, more_of
from oncely.web.visit import Visit


def in_doubt(visit: Visit) -> Response:
    """Those of a consumer, or of all."""
    shown = contents.in_doubt(visit.ledger, visit.consumer, visit.limit, visit.ledger.now())
    return visit.page(
        "in_doubt.html",
        **shown,
        has_probe=any(each["consumer"] in visit.site.probes for _, each in shown["records"]),
        more_link=more_of(visit, shown["more"]),
        decisions=[each for each in RECORDS.values() if ops.IN_DOUBT in each.words],
        command=command("list --state in-doubt", visit),
    )
