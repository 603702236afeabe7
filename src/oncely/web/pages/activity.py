"""Workers, runs on Spark, and the audit: who works, what runs came to, who changed what."""

from starlette.responses import Response

from oncely.core.errors import ConfigError
from oncely.web import contents
from oncely.web.pages.listing import command, more_of
from oncely.web.visit import Visit


def workers(visit: Visit) -> Response:
    """The processes that work with the ledger."""
    shown = contents.workers(visit.ledger, visit.ledger.now())
    return visit.page("workers.html", **shown, command="oncely workers --json")


def runs(visit: Visit) -> Response:
    """The runs on Spark that began last."""
    shown = contents.runs(visit.ledger, visit.limit, visit.ledger.now())
    more_link = more_of(visit, shown["more"])
    return visit.page("runs.html", **shown, more_link=more_link, command=command("runs", visit))


def audit(visit: Visit) -> Response:
    """What people changed last, and before an entry."""
    before = _number(visit.query("before"))
    shown = contents.audit(visit.ledger, before, visit.ledger.now())
    own = "" if before is None else f" --before {before}"
    return visit.page(
        "audit.html",
        **shown,
        older=visit.link("/audit", before=shown["entries"][-1].id) if shown["more"] else None,
        command=f"oncely audit{own} --json",
    )


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ConfigError(f"before: {text!r} is not the number of an entry")
    return int(text)
