"""The report: the dashboard's pages as one file, which loads nothing and runs nothing."""

import hashlib
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from markupsafe import Markup

from oncely import ops
from oncely.core.errors import ConfigError
from oncely.ledger.ledger import Ledger
from oncely.web import contents
from oncely.web.contents import LIMIT, Contents
from oncely.web.rendering import STATIC, render

_MOST_SAMPLES = 20
"""Groups of dead letters of which one is shown in full."""


class _Section(NamedTuple):
    """A page of the dashboard, as a part of the file."""

    name: str
    """Of its anchor, and of its template."""
    title: str
    command: str
    """What prints the same, after `oncely`."""
    shown: Contents | str
    """Or why there is nothing to show."""
    limit: str = ""
    """Which rows are shown, if not all."""
    letters: Collection[int] = ()
    """The dead letters that stand in it in full."""

    def content(self, recipient: "_Recipient") -> Markup:
        """The section as HTML, without its title."""
        if isinstance(self.shown, str):
            return Markup('<p class="note">{}</p>').format(self.shown)
        own = {"visit": recipient, "heading": "h3", "more_link": None}
        template = f"parts/{self.name.replace('-', '_')}.html"
        # A template escapes what it is given. `limit` says what is left out.
        return Markup(render(template, {**own, **self.shown, "more": False}))  # noqa: S704


@dataclass(frozen=True, slots=True)
class _Recipient:
    """Who gets the file, as templates know a visit: nobody who may change anything."""

    letters: Collection[int]
    """The dead letters that are in the file."""
    may_change: bool = False

    def query(self, _name: str) -> None:
        """Nothing is asked for."""

    def link(self, path: str, /, **query: object) -> str | None:
        """Where in the file a page is; None where the file does not have it."""
        if path == "/letter" and query.get("id") in self.letters:
            return f"#letter-{query['id']}"
        return None if query else f"#{path.removeprefix('/')}"


def report(ledger: Ledger, found: ops.LedgerOverview, ledger_name: str) -> str:
    """The file as HTML: where the ledger stands, which is what was `found`, and the first rows of
    each list of the dashboard. `ledger_name` says which ledger it is; no password may be in it.

    Headers and bodies of messages are not in it. Raises StoreUnavailable.
    """
    now = ledger.now()
    style = (STATIC / "oncely.css").read_text(encoding="utf-8")
    sections = [*_sections(ledger, found.status, now)]
    recipient = _Recipient({number for each in sections for number in each.letters})
    known = {
        "visit": recipient,
        "style": Markup(style),  # noqa: S704
        "style_hash": b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        "ledger_name": ledger_name,
        "at": datetime.fromtimestamp(now, UTC),
        "sections": [(each, each.content(recipient)) for each in sections],
    }
    return render("report.html", {**known, **contents.overview(found)})


def _sections(ledger: Ledger, found: ops.Status, now: float) -> Iterator[_Section]:
    went_on = contents.last_day(ledger, ops.activity(ledger), now)
    yield _Section("last-day", "The last day", "activity", went_on)
    yield _Section("consumers", "Consumers", "status", contents.consumers(ledger, found))
    yield from _lists(ledger, found.total, now)
    waiting = ops.backlogs(ledger)
    outbox = contents.outbox(ledger, waiting, now)
    yield _Section("outbox", "Outbox", "outbox status", outbox)
    yield _Section("queues", "Queues", "status", contents.queues(waiting))
    yield _Section("workers", "Workers", "workers", contents.workers(ledger, now))
    runs = contents.runs(ledger, LIMIT, now)
    yield _Section("runs", "Runs on Spark", "runs", runs, _newest(runs, "runs"))
    audit = contents.audit(ledger, None, now)
    yield _Section("audit", "Audit", "audit", audit, _newest(audit, "entries"))


def _lists(ledger: Ledger, total: ops.Summary, now: float) -> Iterator[_Section]:
    """What people may have to decide about."""
    doubtful = contents.in_doubt(ledger, None, LIMIT, now)
    limit = _first(doubtful, "records", total.in_doubt)
    yield _Section("in-doubt", "In doubt", "list --state in-doubt", doubtful, limit)
    failed = _or_why_not(lambda: contents.failed(ledger, None, LIMIT, now))
    limit = _first(failed, "letters", total.dead_letters)
    yield _Section("failed", "Failed", "dead list", failed, limit)
    groups = [] if isinstance(failed, str) else failed["grouped"].groups
    if groups:
        samples = contents.samples(ledger, [each.sample for each in groups[:_MOST_SAMPLES]], now)
        left = len(groups) > _MOST_SAMPLES
        limit = f"Of the {_MOST_SAMPLES} largest of {len(groups):,} groups." if left else ""
        letters = [each["id"] for each in samples["samples"]]
        title = "Failed: samples"
        yield _Section("samples", title, "dead groups", samples, limit, letters)
    waiting = _or_why_not(lambda: contents.waiting(ledger, None, LIMIT, now))
    limit = _first(waiting, "messages", total.waiting)
    yield _Section("waiting", "Waiting", "waiting", waiting, limit)


def _or_why_not(shown: Callable[[], Contents]) -> Contents | str:
    """What a page shows; of a ledger that keeps no messages, the reason why there is nothing."""
    try:
        return shown()
    except ConfigError as error:
        return str(error)


def _first(shown: Contents | str, rows: str, total: int) -> str:
    if isinstance(shown, str) or not shown["more"]:
        return ""
    return f"The first {len(shown[rows]):,} of {total:,}."


def _newest(shown: Contents, rows: str) -> str:
    return f"The newest {len(shown[rows]):,}; there are older ones." if shown["more"] else ""
