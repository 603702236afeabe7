"""What of a consumer's messages waits in its ledger: to be tried again, for others, for people."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.records import record_of
from tests.unit.conftest import Queue

from oncely.consumer import Consumer, window
from oncely.core.errors import ConfigError, StoreError
from oncely.core.ids import fingerprint_of
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.core.verdicts import Ack
from oncely.core.waiting import WaitingMessage
from oncely.ledger.ledger import Ledger
from oncely.ledger.ledger_calls import keep_anew
from oncely.stores.store import PutBack, Transaction
from oncely.testing import ManualClock

KEY = Key("billing", "1")


def consumer_of(queue: Queue, ledger: Ledger, **changes: Any) -> Consumer:
    """Of the queue, with a policy that differs so from the default."""
    policy = replace(Policy(backoff="50ms"), **changes)
    return Consumer(queue, "in").idempotent(ledger, "billing", policy=policy)


def failing(*ids: str, done: list[str] | None = None) -> Callable[[Message], None]:
    """A handler that fails for these, once each, and adds all others to `done`."""
    left = [*ids]

    def handle(message: Message) -> None:
        if message.id in left:
            left.remove(message.id)
            raise ValueError(f"no {message.id}")
        if done is not None:
            done.append(message.id)

    return handle


def one_round(consumer: Consumer, handler: Callable[..., Any]) -> Any:
    """Let it run until something has ended, and stop it."""
    return consumer.consume(handler, drain=True, on_progress=lambda _: consumer.stop())


# ---- Retries -----------------------------------------------------------------------------------


def test_waits_in_the_ledger(queue: Queue, ledger: Ledger, clock: ManualClock) -> None:
    """A message that failed waits with its body; its delivery is acknowledged, and so is every
    other one of it meanwhile. When it is due it comes back by itself.
    """
    queue.publish("in", [Message("1", b'{"to": "anna"}', "mail", {"a": "b"})])
    consumer = consumer_of(queue, ledger, backoff="30s")
    one_round(consumer, failing("1"))
    assert queue.is_drained("in")
    [waiting] = ledger.waiting("billing")
    assert (waiting.key, waiting.attempts) == (KEY, 1)
    assert waiting.message == Message("1", b'{"to": "anna"}', "mail", {"a": "b"})
    assert waiting.error == "ValueError: no 1"
    assert waiting.due == pytest.approx(ledger.now() + 30)
    queue.publish("in", [waiting.message])
    done: list[str] = []
    report = one_round(consumer, failing(done=done))
    assert (done, report.duplicates, queue.verdicts[-1]) == ([], 1, Ack())
    assert [each.id for each in ledger.waiting()] == ["1"]
    clock.advance(31)
    assert one_round(consumer, failing(done=done)).handled == 1
    assert done == ["1"]
    assert [*ledger.waiting()] == []
    record = record_of(ledger, KEY)
    assert (record.state, record.attempts) == (State.COMPLETED, 2)


def test_failure_of_an_untracked_message(queue: Queue, live: Ledger) -> None:
    """A message without an id that runs untracked has no record to wait with: it is tried again all
    the same, and is a dead letter in the end.
    """
    queue.publish("in", [Message("", b"{}")])
    consumer = consumer_of(queue, live, tries=3, backoff="1ms", on_missing_id="untracked")
    report = consumer.consume(failing("", "", ""), drain=True)
    assert (report.retried, report.failed, report.dead_lettered) == (2, 1, 1)
    [letter] = live.dead("billing")
    assert (letter.message.body, letter.reason) == (b"{}", "ValueError: no ")


def test_a_dead_worker_had_it(queue: Queue, ledger: Ledger, clock: ManualClock) -> None:
    """What a worker has taken, and then died, others take when its lease is over."""
    queue.put("1")
    consumer = consumer_of(queue, ledger, backoff="1s", lease="10s")
    one_round(consumer, failing("1"))
    clock.advance(2)
    [_] = ledger.mailbox.take(9, "10s", queue="retry/billing")
    done: list[str] = []
    assert ledger.mailbox.free_in_s("retry/billing") == pytest.approx(10)
    clock.advance(11)
    one_round(consumer, failing(done=done))
    assert done == ["1"]


def test_completed_by_another_delivery(queue: Queue, ledger: Ledger, clock: ManualClock) -> None:
    """Where one more delivery ran what was in doubt, nothing waits of it any more."""
    queue.put("1")
    consumer = consumer_of(queue, ledger, backoff="1s", lease="10s")
    one_round(consumer, failing("1"))
    clock.advance(2)
    [_] = ledger.mailbox.take(9, "60s", queue="retry/billing")
    ledger.reset(KEY)
    queue.put("1")
    done: list[str] = []
    one_round(consumer, failing(done=done))
    assert done == ["1"]
    assert [*ledger.waiting()] == []


def test_fair(no_rest: None, live: Ledger) -> None:
    """A worker that is busy leaves to others what is due."""
    busy, idle = Queue(), Queue()
    busy.put(*map(str, range(5)))
    goes_on = threading.Event()
    failed: list[str] = []
    done: dict[str, list[str]] = {"busy": [], "idle": []}

    def handle(message: Message) -> None:
        if len(failed) < 5:
            failed.append(message.id)
            raise ValueError("not yet")
        if message.id == "long":
            goes_on.wait(60)
        else:
            done["busy"].append(message.id)

    first = consumer_of(busy, live, backoff="300ms")
    second = consumer_of(idle, live)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(first.consume, handle)]
        wait_until(lambda: len(failed) == 5)
        busy.put("long")
        running.append(threads.submit(second.consume, lambda m: done["idle"].append(m.id)))
        wait_until(lambda: len(done["idle"]) == 5)
        assert done["busy"] == []
        goes_on.set()
        first.stop()
        second.stop()
        for each in running:
            each.result()


# ---- Order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_ones", [True, False])
def test_order_over_a_restart(
    queue: Queue, ledger: Ledger, clock: ManualClock, new_ones: bool
) -> None:
    """Behind what waits the others of its key wait, whoever is given them, and when."""
    queue.publish("in", [Message(f"m{n}", b"{}", key="a") for n in (1, 2, 3)])
    done: list[str] = []
    handle = failing("m1", done=done)
    consumer = consumer_of(queue, ledger, backoff="10s").ordered()
    one_round(consumer, handle)
    if new_ones:
        queue.publish("in", [Message("m4", b"{}", key="a"), Message("other", b"{}", key="b")])
    again = consumer_of(queue, ledger, backoff="10s").ordered()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(again.consume, handle)
        wait_until(lambda: queue.is_drained("in"))
        assert done == (["other"] if new_ones else [])
        clock.advance(11)
        wait_until(lambda: len(done) >= 3 + 2 * new_ones)
        again.stop()
        running.result()
    assert [each for each in done if each != "other"] == ["m1", "m2", "m3", "m4"][: 3 + new_ones]


def test_other_content_behind(queue: Queue, ledger: Ledger) -> None:
    """Other content under an id that waits is set aside, also where it would wait behind others."""
    queue.publish("in", [Message("m1", b"{}", key="a"), Message("m2", b"{}", key="a")])
    queue.publish("in", [Message("m2", b"{}", key="a"), Message("m2", b"[]", key="a")])
    consumer = consumer_of(queue, ledger, backoff="10s").ordered()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.consume, failing("m1"))
        wait_until(lambda: queue.is_drained("in"))
        consumer.stop()
        running.result()
    assert {(each.id, each.message.body) for each in ledger.waiting()} == {
        ("m1", b"{}"),
        ("m2", b"{}"),
    }
    [letter] = ledger.dead()
    assert (letter.message.body, letter.reason) == (
        b"[]",
        "MismatchError: 'm2' waits with other content",
    )


@pytest.mark.parametrize("is_discarded", [False, True])
@pytest.mark.parametrize("end", ["waits", "fails", "in doubt"])
def test_other_content_of_a_forgotten_record(
    queue: Queue, ledger: Ledger, clock: ManualClock, end: str, is_discarded: bool
) -> None:
    """What waits of a forgotten record stays, and so does another message under its id, whatever
    comes of that: the one was once overwritten, or the other not kept.
    """
    policy = {"on_in_doubt": "hold", "tries": 1 if end == "fails" else 2, "backoff": "10s"}
    queue.put("1")
    one_round(consumer_of(queue, ledger, **policy | {"tries": 2}), failing("1"))
    if is_discarded:
        ledger.discard(KEY)
    ledger.forget(KEY)
    other = Message("1", b"[]")
    if end == "in doubt":
        ledger.claim(KEY, lease="1s", fingerprint=fingerprint_of(other.body))
        clock.advance(2)
    queue.publish("in", [other])
    one_round(consumer_of(queue, ledger, **policy), failing("1"))
    letters, waiting = [*ledger.dead()], [*ledger.waiting()]
    bodies = {letter.message.body for letter in letters} | {each.message.body for each in waiting}
    assert bodies == {b"{}", b"[]"}
    assert len(letters) == is_discarded + (end != "waits")
    assert queue.is_drained("in")


@pytest.mark.parametrize("comes_back", [False, True])
def test_taken_twice(queue: Queue, ledger: Ledger, clock: ManualClock, comes_back: bool) -> None:
    """Who has taken what waits, and is late, changes nothing of what has come of it since: a dead
    letter stays as it is. So it does where its message is delivered again.
    """
    queue.put("1")
    consumer = consumer_of(queue, ledger, backoff="1s", tries=2)
    one_round(consumer, failing("1", "1"))
    clock.advance(2)
    [late] = ledger.mailbox.take(9, "1s", queue="retry/billing")
    clock.advance(2)
    one_round(consumer, failing("1"))
    [letter] = ledger.dead()
    back = [PutBack(late, None, 0.0, is_try=False)]
    ledger.mailbox.let_go([] if comes_back else [late], back if comes_back else [])
    queue.put("1")
    one_round(consumer, failing("1"))
    assert [*ledger.dead()] == [letter]
    assert [*ledger.waiting()] == []


# ---- Dead letters ------------------------------------------------------------------------------


def test_no_message_at_all(queue: Queue, live: Ledger) -> None:
    """What cannot be handled is kept as it came, with the reason: each for itself."""
    queue.publish("in", [Message("1", b"one"), Message("1", b"two"), Message("", b"a")])
    queue.publish("in", [Message("", b"a"), Message("fax", b"", "fax.sent")])
    consumer = consumer_of(queue, live)
    done: list[str] = []
    report = consumer.consume(failing(done=done), drain=True)
    assert (done, report.dead_lettered) == (["1", "fax"], 3)
    letters = {(letter.key.message_id, letter.message.body): letter for letter in live.dead()}
    assert len([*live.dead()]) == 3
    assert letters.keys() == {("1", b"two"), ("", b"a")}
    assert "other content" in letters["1", b"two"].reason
    assert "id" in letters["", b"a"].reason
    with pytest.raises(ConfigError, match="name one dead letter"):
        live.retry_dead([each.id for each in letters.values()], Message("1"))
    # The other message of that id is not tried again by it.
    assert live.retry_dead(letters["1", b"two"].id) == 1
    assert consumer.consume(failing(done=done), drain=True).dead_lettered == 1
    assert done == ["1", "fax"]


def test_a_letter_that_cannot_be_kept(
    queue: Queue, live: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up no other: each is kept by itself then."""

    def fail_for_some(transaction: Transaction, messages: Sequence[WaitingMessage]) -> None:
        if any(each.message.body == b"bad" for each in messages):
            raise StoreError("not this one")
        keep_anew(transaction, messages)

    monkeypatch.setattr("oncely.ledger.mailbox.keep_anew", fail_for_some)
    queue.publish("in", [Message("", b"bad"), *(Message("", b"good") for _ in range(3))])
    with ThreadPoolExecutor(1) as thread:
        # So that all are of one window.
        consumer = consumer_of(queue, live).concurrency(4)
        running = thread.submit(consumer.consume, failing())
        try:
            wait_until(lambda: len([*live.dead()]) == 3)
        finally:
            consumer.stop()
        running.result()
    [left] = queue.receive("in", 9, 0)
    assert left.message.body == b"bad"


# ---- Types that nobody takes -------------------------------------------------------------------


def test_two_versions(queue: Queue, live: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the newer version takes is handled by that, while both share a queue."""
    monkeypatch.setattr("oncely.core.turn.UNKNOWN_S", 0.02)
    queue.put(*[f"old{n}" for n in range(5)], type="order.placed")
    queue.put(*[f"new{n}" for n in range(5)], type="order.returned")
    done: dict[str, list[str]] = {"old": [], "new": []}
    old, new = consumer_of(queue, live), consumer_of(queue, live)
    old.handler("order.placed")(lambda message: done["old"].append(message.id))
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(old.consume)]
        wait_until(lambda: queue.is_drained("in"))
        new.handler("order.*")(lambda message: done["new"].append(message.id))
        running.append(threads.submit(new.consume))
        wait_until(lambda: len(done["old"] + done["new"]) == 10)
        old.stop()
        new.stop()
        reports = [each.result() for each in running]
    assert sum(report.dead_lettered for report in reports) == 0
    assert [*live.dead(), *live.waiting()] == []
    assert {f"new{n}" for n in range(5)} <= {*done["new"]}


def test_nobody_comes(queue: Queue, ledger: Ledger, clock: ManualClock) -> None:
    """What nobody takes for too long is a dead letter, with that reason, and no try is spent."""
    queue.put("1", type="fax")
    consumer = consumer_of(queue, ledger, wait_unknown="1m").events("mail")
    for _ in range(4):
        consumer.consume(failing(), on_progress=lambda _: consumer.stop())
        assert [(each.id, each.attempts) for each in ledger.waiting()] == [("1", 0)]
        clock.advance(25)
    consumer.consume(failing(), on_progress=lambda _: consumer.stop())
    [letter] = ledger.dead()
    assert "nothing here takes messages of the type 'fax'" in letter.reason
    assert ledger.find(KEY) is None


def test_nobody_takes_it_without_a_ledger(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given back for others; after too long it is rejected."""
    monkeypatch.setattr("oncely.core.turn.UNKNOWN_S", 0.02)
    queue.put("1", type="fax")
    consumer = Consumer(queue, "in").events("mail")
    consumer._settings.policy = Policy(wait_unknown="300ms")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.consume, failing())
        wait_until(lambda: bool(queue.put_aside()))
        consumer.stop()
        report = running.result()
    assert (report.dead_lettered, report.handled) == (1, 0)
    assert report.received > 2
    [dead] = queue.receive("in.dead", 9, 1)
    assert dead.message.id == "1"


# ---- Without a ledger --------------------------------------------------------------------------


def test_order_without_a_ledger(queue: Queue) -> None:
    """What is held holds up those of its key, and no others."""
    queue.publish("in", [Message(f"{key}{n}", b"{}", key=key) for n in (1, 2) for key in "ab"])
    done: list[str] = []
    Consumer(queue, "in").ordered().backoff("50ms").consume(failing("a1", done=done), drain=True)
    assert done == ["b1", "b2", "a1", "a2"]


def test_a_handler_hangs(queue: Queue, live: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits behind it is given back, and another worker handles it; no try is spent."""
    monkeypatch.setattr(window, "SLOW_S", 0.2)
    go_on = threading.Event()
    handled: list[str] = []

    def hang(message: Message) -> None:
        if message.id == "1":
            assert go_on.wait(LIMIT_S)

    queue.put(*map(str, range(1, 4)))
    hanging = Consumer(queue, "in").idempotent(live, "billing")
    other = Consumer(queue, "in").idempotent(live, "billing")
    threads = [
        threading.Thread(target=hanging.consume, args=[hang]),
        threading.Thread(target=other.consume, args=[lambda message: handled.append(message.id)]),
    ]
    threads[0].start()
    # The second is claimed as well, and waits.
    wait_until(lambda: len([*live.scan()]) == 2)
    threads[1].start()
    wait_until(lambda: sorted(handled) == ["2", "3"])
    go_on.set()
    wait_until(lambda: {record.state for record in live.scan()} == {State.COMPLETED})
    for consumer, thread in zip((hanging, other), threads, strict=True):
        consumer.stop()
        thread.join()
    assert [record.attempts for record in live.scan()] == [1, 1, 1]


def test_a_retry_that_another_worker_keeps_while_the_broker_is_asked(
    queue: Queue, ledger: Ledger, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that drains the queue handles it, too."""
    is_drained = queue.is_drained

    def crossed(name: str) -> bool:
        monkeypatch.setattr(queue, "is_drained", is_drained)
        queue.put("1")
        assert one_round(consumer_of(queue, ledger), failing("1")).retried == 1
        clock.advance(1)
        return is_drained(name)

    monkeypatch.setattr(queue, "is_drained", crossed)
    assert consumer_of(queue, ledger).consume(lambda _: None, drain=True).handled == 1
