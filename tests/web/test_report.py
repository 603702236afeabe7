"""The report: what the file holds of a ledger in trouble, and what it must not hold."""

import re
from contextlib import closing
from html import unescape

import pytest
from tests.records import granted
from tests.web.conftest import HOSTILE, PAGES, Reader, Trouble, text

from oncely import Key, Ledger, Message, open_ledger, ops
from oncely.core.activity import Run, Worker
from oncely.core.waiting import WaitingMessage
from oncely.stores.memory_store import MemoryStore
from oncely.stores.store import PutBack
from oncely.web import dashboard
from oncely.web.report import report

SECTIONS = [
    *("last-day", "consumers", "in-doubt", "failed", "samples", "waiting", "outbox", "queues"),
    *("workers", "runs", "audit"),
]
_ROW = re.compile(r"<tr>(?!<th scope=\"col\").*?</tr>", re.DOTALL)
_UNSEEN = re.compile(r'<span class="unseen">.*?</span>')


def written(ledger: Ledger) -> str:
    """The report of a ledger."""
    return report(ledger, ops.overview(ledger), "sqlite:///ledger.db")


def sections(page: str) -> dict[str, str]:
    """What each section says, without its markup; "" is what stands before them."""
    before, *parts = re.split(r'<section id="([^"]*)"[^>]*>', page)
    found = dict(zip(parts[::2], map(text, parts[1::2]), strict=True))
    return {"": text(before), **found}


def samples_in(page: str) -> int:
    """How many dead letters stand in the file; there are details of the last day, too."""
    return page.partition('<section id="samples"')[2].partition("</section>")[0].count("<details>")


def rows(page: str) -> set[str]:
    """What each row of the tables says."""
    return {text(_UNSEEN.sub("", row)) for row in _ROW.findall(page)}


def refuse(ledger: Ledger, destination: str, reason: str) -> None:
    """A message that the broker has refused."""
    claim = granted(ledger.claim(Key("shop", f"for {destination}")))
    ledger.handled(claim, None, [WaitingMessage("x", destination, Message("x"), claim.key)])
    [refused] = [each for each in ledger.mailbox.take(9, "1s") if each.destination == destination]
    ledger.mailbox.put_back([PutBack(refused, reason, None)])


def test_sections_of_trouble(filled: Trouble) -> None:
    """Each section says what is wrong, and why."""
    refuse(filled.ledger, "texts", "no queue 'texts'")
    filled.clock.advance(120)
    found = sections(written(filled.ledger))
    assert list(found) == ["", *SECTIONS]
    assert "sqlite:///ledger.db As of 20" in found[""]
    assert "Stuck 2 in doubt (oldest: 1 h 2 min) 1 dead letter" in found[""]
    assert "settle it: oncely settle ." in found["in-doubt"]
    assert "message id order-3 attempts 1" in found["samples"]
    assert "Traceback (most recent call last):" in found["samples"]
    assert "texts for texts (shop) 1 no queue 'texts'" in found["outbox"]
    assert "No relay has taken the oldest for 2 min." in found["outbox"]


def test_operations(sqlite_ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was handled in the last day is drawn and said; workers, runs and the audit are there."""
    with closing(open_ledger(sqlite_ledger_url)) as ledger:
        for number in range(3):
            ledger.complete(granted(ledger.claim(Key("billing", f"m{number}"))))
        ledger.fail(granted(ledger.claim(Key("billing", "bad"))), "no", final=True)
        ledger.recorder.tell()
        ops.reset(ledger, ops.find(ledger, "bad"), by="anna", why="paid by hand")
        worker = Worker("w1", "consumer", "billing", "shop-2", 4711, "1.0", 0.0, 0.0, 2)
        ledger.operations.keep_worker(worker, [])
        totals = {"received": 48_000, "handled": 47_993, "quarantined": {"missing_id": 7}}
        ledger.operations.keep_run(Run("r1", "nightly", "billing", 1.0, 61.0, totals))
        # Both say how long ago that was.
        now = ledger.now()
        monkeypatch.setattr(Ledger, "now", lambda _: now)
        page = written(ledger)
        reader = Reader(dashboard(ledger))
        shown = {path: rows(reader.get(path)) for path in ("/workers", "/runs", "/audit")}
    assert '<rect class="handled"' in page
    assert '<rect class="failed"' in page
    assert "<span>4</span><span>2</span><span>0</span>" in page
    for path, found in shown.items():
        assert found
        assert found <= rows(page), path


def test_same_as_the_pages(filled: Trouble) -> None:
    """Each row that the dashboard shows to a viewer stands in the file."""
    refuse(filled.ledger, "texts", "no queue 'texts'")
    reader = Reader(dashboard(filled.ledger))
    shown = rows(written(filled.ledger))
    # The counts of the overview stand in the table of consumers; a search is not in the file.
    pages = {
        # A file cannot export a group.
        path: {row.removesuffix(" export") for row in rows(reader.get(path))}
        for path in PAGES
        if path not in {"/", "/messages"}
    }
    assert {path: found - shown for path, found in pages.items() if found - shown} == {}
    assert sum(map(len, pages.values())) >= 10


def test_nothing_of_others_is_markup(trouble: Trouble) -> None:
    """Ids, consumers, types, errors, destinations, reasons and the ledger's name are data."""
    trouble.doubt(HOSTILE, consumer=HOSTILE)
    trouble.fail(Message(HOSTILE, b"", HOSTILE, {"x": HOSTILE}, HOSTILE), error=HOSTILE)
    trouble.wait(Message(f"{HOSTILE}2", b"", HOSTILE), error=HOSTILE)
    trouble.defer(f"{HOSTILE}3", HOSTILE)
    refuse(trouble.ledger, f"{HOSTILE}4", HOSTILE)
    page = report(trouble.ledger, ops.overview(trouble.ledger), HOSTILE)
    for each in sections(page).values():
        assert "\u202e" not in each
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("alert(&#39;1&#39;)") > 10
    # A cell's label is the word of its column, whatever the cell holds.
    labels = set(re.findall(r'data-label="([^"]*)"', page))
    assert {"message id", "error", "destination"} <= labels
    assert all(re.fullmatch(r"[a-z0-9 ]+", label) for label in labels)


def test_it_stands_alone(filled: Trouble) -> None:
    """No form, no button, no script; each link leads to a place in the file; no id is there
    twice; nothing is loaded.
    """
    refuse(filled.ledger, "texts", "no")
    page = written(filled.ledger)
    for word in ("<form", "<button", "<input", "<script", "hx-", "http:", "https:", "url("):
        assert word not in page
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    places = [unescape(place) for place in re.findall(r' href="([^"]*)"', page)]
    places.remove("data:,")
    assert {place.removeprefix("#") for place in places} <= {*ids}
    assert all(place.startswith("#") for place in places)
    [letter] = filled.fail()
    assert f'<a href="#letter-{letter}">' in page


def test_limits_are_said(trouble: Trouble) -> None:
    """Of a long list the file has the first hundred, and says of how many; of more than twenty
    groups, the twenty largest have a sample.
    """
    trouble.doubt(*(f"order-{number:03}" for number in range(120)))
    for letter in "abcdefghijklmnopqrstu":
        trouble.fail(Message(f"failed-{letter}"), error=f"reason {letter * 3}")
    page = written(trouble.ledger)
    found = sections(page)
    assert "The first 100 of 120." in found["in-doubt"]
    assert "order-099" in found["in-doubt"]
    assert "order-100" not in found["in-doubt"]
    assert "choose a consumer" not in found["in-doubt"]
    assert "Of the 20 largest of 21 groups." in found["samples"]
    assert samples_in(page) == 20


def test_bodies_and_headers_are_not_in_it(trouble: Trouble) -> None:
    """What may be personal is left out; what looks like a password is masked."""
    message = Message("order-1", b'{"iban": "DE02"}', "order", {"who": "anna-the-customer"})
    trouble.fail(message, error="cannot reach postgresql://u:geheim@db/x")
    trouble.wait(Message("order-2", b'{"iban": "DE03"}', "order", {"who": "anna-the-customer"}))
    page = written(trouble.ledger)
    assert "order-1" in page
    assert "postgresql://u:***@db/x" in page
    for word in ("DE02", "DE03", "anna-the-customer", "geheim"):
        assert word not in page


def test_peace() -> None:
    """A ledger in which nothing is says so, section by section."""
    found = sections(written(Ledger(MemoryStore())))
    assert list(found) == ["", *(name for name in SECTIONS if name != "samples")]
    assert "Nothing is stuck" in found[""]
    assert "The ledger has no records yet." in found["consumers"]
    assert "Nothing is in doubt." in found["in-doubt"]
    assert "No dead letters." in found["failed"]
    for name in ("last-day", "workers", "runs", "audit"):
        assert "This store keeps no activity, workers, runs or audit" in found[name]


def test_redis(redis_url: str) -> None:
    """Where no messages wait in the ledger, the sections of messages say why not."""
    with closing(open_ledger(redis_url)) as ledger:
        granted(ledger.claim(Key("billing", "order-1")))
        found = sections(written(ledger))
    assert "billing" in found["consumers"]
    for name in ("failed", "waiting"):
        assert "beside each queue NAME" in found[name]
    assert "This store keeps no messages to be sent" in found["outbox"]
    assert "This store keeps no activity" in found["audit"]


def test_a_letter_that_is_gone_meanwhile(filled: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead letter that is retried while the file is written is left out."""
    grouped = ops.letter_groups

    def then_retried(*given: object) -> ops.FoundGroups[int]:
        found = grouped(*given)  # type: ignore[arg-type]
        ops.retry_letters(filled.ledger, [found.groups[0].sample], by="anna")
        return found

    monkeypatch.setattr(ops, "letter_groups", then_retried)
    page = written(filled.ledger)
    assert samples_in(page) == 0
    assert "ValueError: no such customer" in sections(page)["failed"]
