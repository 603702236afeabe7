"""Messages in doubt: what is known of each, and probes that operators ask from the page."""

import re
import threading
from typing import Any

import pytest
from tests.records import granted, record_of
from tests.web.conftest import Reader, Trouble, as_user, text

from oncely import Key, Message, State, ops
from oncely._util.chance import Process
from oncely.core.activity import AuditEntry, Worker
from oncely.core.errors import RefusedError, StoreUnavailable
from oncely.core.record import Record
from oncely.core.waiting import WaitingMessage
from oncely.ops import decisions
from oncely.stores.sql import SqlStore
from oncely.web import dashboard
from oncely.web.pages import records

ANSWERS = {"order-1": "happened", "order-2": "not_happened", "order-3": "unknown"}


def answering(message: Message) -> Any:
    """A probe that knows what became of two of three."""
    return ANSWERS[message.id]


def record(trouble: Trouble, id_: str, consumer: str = "billing") -> Record:
    """The record of that message."""
    return record_of(trouble.ledger, Key(consumer, id_))


def reader(trouble: Trouble, **probes: Any) -> Reader:
    """An operator of a dashboard with these probes."""
    return Reader(dashboard(trouble.ledger, auth=as_user(), probes=probes))


def probed(reader: Reader, **chosen: Any) -> str:
    """What the page says when a probe was asked about these, or all."""
    page = reader.get("/in-doubt")
    asking = reader.send(page, "/records/confirm", decision="probe", **(chosen or {"every": "yes"}))
    return text(reader.send(asking, "/records/change", why="the log is back"))


def buttons(page: str) -> list[str]:
    """The decisions that a page offers."""
    return re.findall(r'name="decision" value="([\w-]+)"', page)


def test_what_is_known(trouble: Trouble) -> None:
    """The list has the steps that are done, and says that nothing has been sent."""
    claim = granted(trouble.ledger.claim(Key("shop", "order-9")))
    trouble.ledger.keep_step(claim, "charge", {"receipt": 7})
    trouble.ledger.keep_step(claim, "mail", None)
    trouble.doubt("order-1")
    page = text(reader(trouble).get("/in-doubt"))
    assert "order-9 shop 1 1 charge, mail 20" in page
    assert "order-1 billing 1 1 - 20" in page
    assert "what a message in doubt would send has not left" in page
    found = ops.select(trouble.ledger, ops.Selection(states=[ops.IN_DOUBT])).records
    [first] = ops.doubts(trouble.ledger, [each for each in found if each.key.consumer == "shop"])
    assert first.as_dict(trouble.ledger.now())["steps"] == ["charge", "mail"]


def test_what_is_known_is_asked_once(trouble: Trouble, asked: list[str]) -> None:
    """What a page asks of the database does not grow with the records on it."""

    def statements(*ids: str) -> int:
        for id_ in ids:
            claim = granted(trouble.ledger.claim(Key("shop", id_)))
            trouble.ledger.keep_step(claim, f"charge {id_}", None)
            trouble.ledger.mailbox.keep([WaitingMessage("m", "mails", Message("m"), claim.key)])
        trouble.clock.advance(3_660)
        asked.clear()
        page = text(reader(trouble).get("/in-doubt"))
        assert [id_ for id_ in ids if f"{id_} shop 1 1 charge {id_} " not in page] == []
        return len(asked)

    assert statements("order-0") == statements(*(f"order-{number}" for number in range(1, 30)))


def test_whose_claims_they_were(trouble: Trouble) -> None:
    """The worker that claimed a message is named beside it."""
    trouble.doubt("order-1")
    of_others = Worker("w12", "consumer", "billing", "host-1", 12, "1.0", 0.0, 0.0, 1, 7)
    for worker in (of_others, of_others._replace(id="w11", pid=11, number=Process.number)):
        trouble.ledger.operations.keep_worker(worker, [])
    page = text(reader(trouble).get("/in-doubt"))
    assert "host-1:11" in page
    assert "host-1:12" not in page


def test_no_button_without_a_probe(trouble: Trouble) -> None:
    """Where no listed consumer has a probe, none can be asked; of a list with several consumers,
    those with a probe are asked about.
    """
    trouble.doubt("order-1")
    trouble.doubt("order-2", consumer="mailing")
    with_probe = reader(trouble, billing=answering)
    assert "probe" not in buttons(reader(trouble).get("/in-doubt"))
    assert "probe" in buttons(with_probe.get("/in-doubt"))
    assert "probe" not in buttons(with_probe.get("/in-doubt", consumer="mailing"))
    assert "probe" in buttons(with_probe.get("/message", id="order-1"))
    assert "probe" not in buttons(with_probe.get("/message", id="order-2"))
    done = probed(with_probe)
    assert "1 settled by the probe, 1 refused" in done
    assert "'order-2' (mailing): its consumer has no probe here" in done
    assert record(trouble, "order-2", "mailing").state is State.PROCESSING


def test_a_probe_decides(trouble: Trouble) -> None:
    """What it finds out is done, and is in the audit with who asked and why."""
    trouble.doubt(*ANSWERS)
    done = probed(reader(trouble, billing=answering))
    assert "2 settled by the probe, 1 refused" in done
    assert "'order-1' (billing): happened" in done
    assert "'order-2' (billing): not happened" in done
    assert "'order-3' (billing): unknown" in done
    assert record(trouble, "order-1").state is State.COMPLETED
    assert record(trouble, "order-2").state is State.FAILED
    assert record(trouble, "order-3").state is State.PROCESSING
    assert [
        (each.by, each.action, each.message_id, each.changed, each.why)
        for each in reversed(trouble.ledger.operations.audit())
    ] == [
        ("anna", "settled_happened", "order-1", 1, "probe: happened; the log is back"),
        ("anna", "settled_not_happened", "order-2", 1, "probe: not happened; the log is back"),
        ("anna", "probed", "order-3", 0, "probe: unknown; the log is back"),
    ]


def test_what_the_audit_does_not_take_is_left(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the audit cannot be written any more, the page has what was decided before, and says
    of the others that nothing was changed.
    """
    note, entries = SqlStore.note, list[AuditEntry]()

    def once(store: SqlStore, entry: AuditEntry) -> int:
        entries.append(entry)
        if len(entries) > 1:
            raise StoreUnavailable("gone")
        return note(store, entry)

    monkeypatch.setattr(SqlStore, "note", once)
    trouble.doubt(*ANSWERS)
    done = probed(reader(trouble, billing=answering))
    assert "1 settled by the probe, 2 refused" in done
    assert "'order-1' (billing): happened" in done
    assert "'order-2' (billing): nothing was changed, as the audit cannot be written: gone" in done
    assert record(trouble, "order-2").state is State.PROCESSING


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no route to\npassword=geheim"), "ConnectionError: no route to Back"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_probe_that_raises(trouble: Trouble, error: BaseException, said: str) -> None:
    """It does not know: its error stands in one line, passwords masked, and nothing changes."""

    def broken(_: Message) -> Any:
        raise error

    trouble.doubt("order-1")
    done = probed(reader(trouble, billing=broken))
    assert "0 settled by the probe, 1 refused" in done
    assert f"'order-1' (billing): unknown: {said}" in done
    assert record(trouble, "order-1").state is State.PROCESSING


def test_a_probe_that_hangs(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for, others are asked about no more in this request, and a late answer
    changes nothing; so many that hang are the most.
    """
    until, ended = threading.Event(), threading.Semaphore(0)

    def hanging(_: Message) -> Any:
        until.wait(60)
        ended.release()
        return "happened"

    trouble.doubt("order-1", "order-2")
    monkeypatch.setattr(records, "_PROBING_S", 0.0)
    monkeypatch.setattr(decisions, "_free", threading.BoundedSemaphore(1))
    found = ops.probe(trouble.ledger, record(trouble, "order-1"), hanging, by="anna", within=0.01)
    assert (found.finding, found.error) == ("unknown", "it has not answered within 0 s")
    with pytest.raises(RefusedError, match="have not come back yet"):
        ops.probe(trouble.ledger, record(trouble, "order-2"), answering, by="anna")
    done = probed(reader(trouble, billing=answering))
    assert "'order-2' (billing): not asked, as the others took too long: choose it again" in done
    until.set()
    assert ended.acquire(timeout=60)
    assert record(trouble, "order-1").state is State.PROCESSING


def test_only_about_what_is_in_doubt(trouble: Trouble) -> None:
    """A message that a worker has is not asked about, nor one that is completed; one with a claim
    without an end is.
    """
    for id_ in ("live", "done"):
        claim = granted(trouble.ledger.claim(Key("billing", id_)))
    trouble.ledger.complete(claim)
    granted(trouble.ledger.claim(Key("billing", "order-1"), "none"))
    for id_ in ("live", "done"):
        with pytest.raises(RefusedError, match="only a record in doubt can be asked about"):
            ops.probe(trouble.ledger, record(trouble, id_), answering, by="anna")
    found = ops.probe(trouble.ledger, record(trouble, "order-1"), answering, by="anna")
    assert (found.finding, record(trouble, "order-1").state) == ("happened", State.COMPLETED)
