"""`oncely activity`, `workers`, `runs` and `audit`: what went on, and who changed what."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.tables import ago, aligned, cut, folded, loud, put_found, unbroken, words
from oncely.cli.terminal import put_json
from oncely.core.shown import moment, span

if TYPE_CHECKING:
    from oncely.ledger.ledger import Ledger


@options.command("activity", "oncely activity --json")
@options.open_ledger
def activity(ledger: "Ledger", as_json: bool) -> None:
    """Show what came of the messages of each consumer in the last hour and day."""
    ops.check_kept(ledger)
    found = ops.activity(ledger)
    if as_json:
        put_json(found.as_dict())
        return
    failed = ("failed\nattempts", "failed\npermanently")
    counts = ("handled", "duplicates", *failed, "in\ndoubt", "p50", "p95", "attempts")
    put_found(
        (folded("consumer"), "last", *map(aligned, counts)),
        (
            (
                *(consumer, name, rates.handled, rates.duplicates),
                *(rates.failed, rates.exhausted, rates.in_doubt),
                *(None if s is None else f"{s:g} s" for s in (rates.p50_s, rates.p95_s)),
                None if rates.attempts is None else f"{rates.attempts:.2f}",
            )
            for consumer in found.day
            for name, times in (("hour", found.hour), ("day", found.day))
            if (rates := times.get(consumer)) is not None
        ),
        "no activity in the last day",
    )


@options.command("workers", "oncely workers")
@options.open_ledger
def workers(ledger: "Ledger", as_json: bool) -> None:
    """List the processes that work with the ledger, those that were killed among them."""
    ops.check_kept(ledger)
    found, now = ops.workers(ledger), ledger.now()
    if as_json:
        put_json({"workers": [each.as_dict() for each in found]})
        return
    texts = ("kind", folded("consumer"), folded("host"))
    ages = (aligned("started"), aligned("last seen"))
    put_found(
        (*texts, aligned("pid"), aligned("claims"), *ages, "version", ""),
        (
            (
                *(each.kind, each.consumer, each.host, str(each.pid), each.claims),
                *(ago(each.started, now), ago(each.seen, now), each.version),
                loud("" if is_alive else "silent", "dead"),
            )
            for each, is_alive in found
        ),
        "no workers",
    )


@options.command("runs", "oncely runs --limit 10")
@options.limit(50)
@options.open_ledger
def runs(ledger: "Ledger", limit: int, as_json: bool) -> None:
    """List the runs on Spark, the newest first."""
    ops.check_kept(ledger)
    found, now = ledger.operations.runs(limit), ledger.now()
    if as_json:
        put_json({"runs": [run._asdict() for run in found]})
        return
    put_found(
        (folded("name"), folded("consumer"), unbroken("began"), aligned("took"), "totals"),
        (
            (
                *(run.name, run.consumer, moment(run.began, now)),
                None if run.ended is None else span(run.ended - run.began),
                cut(run.error or _totals_in_words(run.totals) or None),
            )
            for run in found
        ),
        "no runs",
    )


@options.command("audit", "oncely audit --limit 20")
@options.limit()
@options.option("--before", values.NUMBER, "only entries numbered below this")
@options.open_ledger
def audit(ledger: "Ledger", limit: int, before: int | None, as_json: bool) -> None:
    """List what people have changed, the newest first."""
    ops.check_kept(ledger)
    found, now = ledger.operations.audit(limit, before), ledger.now()
    if as_json:
        put_json({"audit": [entry._asdict() for entry in found]})
        return
    texts = (unbroken("when"), folded("by"), "action", folded("consumer"))
    counts = (folded("message id"), aligned("changed"), aligned("refused"))
    put_found(
        (aligned("id"), *texts, *counts, "why"),
        (
            (
                *(str(entry.id), ago(entry.at, now), entry.by, words(entry.action)),
                *(entry.consumer, entry.message_id, entry.changed_in_words(), entry.refused),
                cut(entry.why or None),
            )
            for entry in found
        ),
        "nobody has changed anything",
    )


def _totals_in_words(totals: Mapping[str, Any]) -> str:
    """What a run counted, if it is not nothing; the time that it took has a column."""
    counted = {
        name: sum(each.values()) if isinstance(each, Mapping) else each
        for name, each in totals.items()
        if name != "seconds"
    }
    return ", ".join(f"{words(name)} {count:,}" for name, count in counted.items() if count)
