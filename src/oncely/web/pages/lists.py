"""The overview and the lists: what a ledger has, as one page each shows it."""

import shlex
from collections.abc import Callable, Iterable
from typing import Any

from starlette.responses import Response

from oncely import ops
from oncely.core.errors import ConfigError
from oncely.ledger.ledger import Ledger
from oncely.web import contents
from oncely.web.contents import LIMIT, Contents
from oncely.web.decisions import RECORDS, UNSENT, WAITING, OperatorDecision
from oncely.web.visit import MOST, Visit


def command(words: str, visit: Visit) -> str:
    """The command line that prints what the list shows."""
    consumer = visit.consumer
    own = "" if consumer is None else f" --consumer {shlex.quote(consumer)}"
    limit = "" if visit.limit == LIMIT else f" --limit {visit.limit}"
    return f"oncely {words}{own}{limit} --json"


def more_of(visit: Visit, more: bool) -> str | None:
    """The address of the same list with more rows; None where there are no more to show."""
    return visit.here(limit=min(10 * visit.limit, MOST)) if more and visit.limit < MOST else None


def part(visit: Visit, name: str, title: str, **shown: Any) -> Response:
    """A page that is one part."""
    return visit.page("part.html", part=name, title=title, **shown)


def listed(
    visit: Visit,
    name: str,
    title: str,
    show: Callable[[Ledger, str | None, int, float], Contents],
    decisions: Iterable[OperatorDecision],
    words: str,
) -> Response:
    """The messages of a consumer, or of all, that `show` gives, and what can be decided of them."""
    shown = show(visit.ledger, visit.consumer, visit.limit, visit.ledger.now())
    return part(
        visit,
        name,
        title,
        **shown,
        more_link=more_of(visit, shown["more"]),
        decisions=[*decisions],
        command=command(words, visit),
    )


def overview(visit: Visit) -> Response:
    """Whether anything is stuck, where to go from here, and what went on in the last day."""
    return visit.page(
        "overview.html",
        **contents.overview(ops.overview(visit.ledger, visit.site.problems())),
        **contents.last_day(visit.ledger, visit.site.activity(), visit.ledger.now()),
        is_live=visit.query("refresh") != "off",
        command="oncely status --json",
    )


def consumers(visit: Visit) -> Response:
    """Every consumer that the ledger knows, and its rates."""
    return visit.page(
        "consumers.html",
        **contents.consumers(visit.ledger, ops.status(visit.ledger)),
        **contents.last_day(visit.ledger, visit.site.activity(), visit.ledger.now()),
        command="oncely status --json",
    )


def in_doubt(visit: Visit) -> Response:
    """Claims whose lease has run out: those of a consumer, or of all."""
    decisions = (each for each in RECORDS.values() if ops.IN_DOUBT in each.words)
    words = "list --state in-doubt"
    return listed(visit, "in-doubt", "In doubt", contents.in_doubt, decisions, words)


def waiting(visit: Visit) -> Response:
    """What has failed and is tried again by itself, and when: of a consumer, or of all."""
    decisions = WAITING.values()
    return listed(visit, "waiting", "Waiting", contents.waiting, decisions, "waiting")


def outbox(visit: Visit) -> Response:
    """What handlers have sent and a relay has not published yet, by destination."""
    return part(
        visit,
        "outbox",
        "Outbox",
        **contents.outbox(visit.ledger, ops.backlogs(visit.ledger), visit.ledger.now()),
        decisions=UNSENT.values(),
        command="oncely outbox status --json",
    )


def queues(visit: Visit) -> Response:
    """What programs have put into each queue of the ledger."""
    shown = contents.queues(ops.backlogs(visit.ledger))
    return part(visit, "queues", "Queues", **shown, command="oncely status --json")


def runs(visit: Visit) -> Response:
    """The runs on Spark that began last."""
    shown = contents.runs(visit.ledger, visit.limit, visit.ledger.now())
    more_link = more_of(visit, shown["more"])
    shown |= {"more_link": more_link, "command": command("runs", visit)}
    return part(visit, "runs", "Runs on Spark", **shown)


def audit(visit: Visit) -> Response:
    """What people changed last, and before an entry."""
    before = visit.query("before")
    if before is not None and (not before.isascii() or not before.isdigit() or len(before) > 18):
        raise ConfigError(f"before: {before!r} is not the number of an entry")
    number = None if before is None else int(before)
    shown = contents.audit(visit.ledger, number, visit.ledger.now())
    own = "" if number is None else f" --before {number}"
    return visit.page(
        "audit.html",
        **shown,
        older=visit.link("/audit", before=shown["entries"][-1].id) if shown["more"] else None,
        command=f"oncely audit{own} --json",
    )
