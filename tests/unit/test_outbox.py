"""The relay on a ledger and queues in memory: what is sent, in which order, and what is not."""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.logs import of_event
from tests.meddling import MeddlingStore
from tests.records import granted, record_of

from oncely.core.errors import (
    BrokerRefused,
    ConfigError,
    PublishRefused,
    StoreUnavailable,
    TransportError,
)
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.core.waiting import OUTBOX, WaitingMessage, deferred_id
from oncely.ledger.ledger import Ledger
from oncely.outbox import Relay, RelayReport
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Limits

Defer = Callable[..., list[WaitingMessage]]


class Broker(StoreTransport):
    """Queues in memory that can be away, and that tell what is published together."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), Limits(max_bytes=10))
        for name in ("out", "mail", "bank"):
            self.subscribe(name, [])
        self.calls: list[list[str]] = []
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None

    def publish(
        self, destination: str, messages: Sequence[Message], *, create: bool = True
    ) -> None:
        """As the queues do it."""
        self.before()
        self.calls.append([message.id for message in messages])
        try:
            super().publish(destination, messages, create=create)
        except PublishRefused as error:
            # As if there were no room for them now.
            raise PublishRefused(error.refused, set(error.refused)) from None
        self.after()

    def arrived(self, queue: str = "out") -> list[str]:
        """The bodies of what is in a queue, in order."""
        deliveries = self.receive(queue, 10_000, 0)
        return [delivery.message.body.decode() for delivery in deliveries]


def away() -> None:
    raise TransportError("the broker is away")


@pytest.fixture
def broker() -> Broker:
    """A broker that takes bodies of ten bytes."""
    return Broker()


@pytest.fixture
def relay(ledger: Ledger, broker: Broker, clock: ManualClock) -> Relay:
    """A relay with the ledger's clock: two tries, the second after five seconds."""
    return Relay(ledger, broker, tries=2, backoff="5s", clock=clock)


@pytest.fixture
def defer(ledger: Ledger) -> Defer:
    """Handle a message that defers bodies, for one destination; its claim is over."""

    def handle(
        parent: str, *bodies: str, to: str = "out", key: str | None = None, delay_s: float = 0.0
    ) -> list[WaitingMessage]:
        claim = granted(ledger.claim(Key("shop", parent)))
        ids = [deferred_id(claim.key, position) for position in range(len(bodies))]
        deferred = [
            WaitingMessage(
                id_, to, Message(id_, body.encode(), key=key), claim.key, position, delay_s
            )
            for position, (id_, body) in enumerate(zip(ids, bodies, strict=True))
        ]
        ledger.handled(claim, deferred=deferred)
        return deferred

    return handle


def state(ledger: Ledger, parent: str) -> State:
    return record_of(ledger, Key("shop", parent)).state


@contextmanager
def running(relay: Relay) -> Iterator[None]:
    """The relay runs for as long as the block, in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=relay.run, args=[stop])
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


# ---- What is sent ------------------------------------------------------------------------------


def test_sent_in_order(relay: Relay, ledger: Ledger, broker: Broker, defer: Defer) -> None:
    """What waits is sent in the order of sending, under its id, and its message is completed."""
    deferred = defer("order-1", "a", "b", "c")
    assert state(ledger, "order-1") is State.HANDLED
    assert relay.send_waiting().sent == 3
    assert [id_ for call in broker.calls for id_ in call] == [message.id for message in deferred]
    assert broker.arrived() == ["a", "b", "c"]
    assert state(ledger, "order-1") is State.COMPLETED
    assert ledger.mailbox.backlog().waiting == 0
    assert relay.send_waiting().sent == 0


# ---- What is refused ---------------------------------------------------------------------------


def test_refused(
    relay: Relay,
    ledger: Ledger,
    broker: Broker,
    clock: ManualClock,
    defer: Defer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A refused message does not hold others; it is tried again, then set aside, and logged."""
    defer("order-1", "much too long")
    defer("order-2", "b")
    report = relay.send_waiting()
    assert (report.sent, report.refused, report.set_aside) == (1, 1, 0)
    assert str(report.error).startswith("out: ")
    [waiting] = ledger.mailbox.deferred(Key("shop", "order-1"))
    assert (waiting.attempts, waiting.error) == (1, "body of 13 bytes is over the limit of 10")
    assert relay.send_waiting().refused == 0
    clock.advance(6)
    report = relay.send_waiting()
    assert (report.sent, report.refused, report.set_aside) == (0, 0, 1)
    [logged] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(logged)["event"] == "deferred_set_aside"
    assert ledger.mailbox.backlog().set_aside == 1
    assert state(ledger, "order-1") is State.HANDLED


def test_others_of_its_lane_wait(
    relay: Relay, ledger: Ledger, broker: Broker, clock: ManualClock, defer: Defer
) -> None:
    """None of its lane overtakes a refused message; they go on as soon as it is set aside."""
    defer("order-1", "much too long", "b", "c")
    defer("order-2", "x", "y")
    assert relay.send_waiting().sent == 2
    assert broker.arrived() == ["x", "y"]
    clock.advance(31)
    report = relay.send_waiting()
    assert (report.set_aside, report.sent) == (1, 2)
    assert broker.arrived() == ["b", "c"]


def test_a_lane_goes_one_by_one(relay: Relay, broker: Broker, defer: Defer) -> None:
    """Two of one lane never go to the transport together: it might refuse the first only."""
    defer("order-1", "a", "b", "c")
    defer("order-2", "x", "y")
    relay.send_waiting()
    assert [len(call) for call in broker.calls] == [2, 2, 1]


@pytest.mark.parametrize(
    ("body", "to", "why"),
    [
        ("eleven long", "out", "out: body of 11 bytes is over the limit of 10"),
        ("a", "typing-eror", "typing-eror: 'typing-eror': no queue takes it"),
        ("a", "events:", "events:: destination: 'events:' names no type"),
        ("a", "exchange:orders/new", "exchange:orders/new: 'exchange:orders/new': there are no"),
    ],
)
def test_refused_for_good(
    ledger: Ledger,
    defer: Defer,
    caplog: pytest.LogCaptureFixture,
    body: str,
    to: str,
    why: str,
) -> None:
    """What can never be sent is set aside at once, with the reason; it holds up no other."""
    queues = StoreTransport(MemoryStore(), Limits(max_bytes=10))
    queues.subscribe("out", [])
    defer("order-1", body, to=to)
    defer("order-2", "good")
    report = Relay(ledger, queues).send_waiting()
    assert (report.sent, report.refused, report.set_aside) == (1, 0, 1)
    assert report.error is not None
    assert report.error.startswith(why)
    [record] = of_event(caplog, "deferred_set_aside")
    assert record.__dict__["destination"] == to
    [aside] = ledger.mailbox.listed(OUTBOX, 9, is_set_aside=True)
    assert str(aside.reason) in report.error


def test_a_destination_that_fails_alone(
    ledger: Ledger,
    broker: Broker,
    defer: Defer,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that neither takes nor refuses what it is sent holds up no other: it is tried again after
    a pause, and no try is counted.
    """
    publish = broker.publish

    def unsure(destination: str, messages: Sequence[Message], *, create: bool = True) -> None:
        if destination == "mail":
            raise TransportError("not confirmed in time")
        publish(destination, messages, create=create)

    broker.publish = unsure  # type: ignore[method-assign]
    for number in range(3):
        defer(f"order-{number}", f"m{number}", to="mail")
        defer(f"other-{number}", f"o{number}")
    relay = Relay(ledger, broker)
    report = relay.send_waiting()
    assert (report.sent, report.refused, report.set_aside, report.is_away) == (3, 0, 0, False)
    assert report.error == "mail: TransportError: not confirmed in time"
    [told] = [vars(each) for each in of_event(caplog, "destination_unavailable")]
    assert (told["destination"], told["count"]) == ("mail", 3)
    assert {each.attempts for each in ledger.mailbox.listed(OUTBOX, 9)} == {0}
    assert relay.send_waiting().sent == 0
    broker.publish = publish  # type: ignore[method-assign]
    clock.advance(5)
    assert relay.send_waiting().sent == 3


def test_no_destination_takes_anything(ledger: Ledger, broker: Broker, defer: Defer) -> None:
    """Then the broker is away: all is left as it was, and can be taken at once."""
    defer("order-1", "a", to="mail")
    defer("order-2", "b")
    broker.before = away
    relay = Relay(ledger, broker)
    with pytest.raises(TransportError, match="the broker is away"):
        relay.send_waiting()
    assert len(broker.calls) == 0
    broker.before = lambda: None
    assert relay.send_waiting().sent == 2


# ---- The broker away, the hold over ------------------------------------------------------------


def test_confirmed_is_marked(relay: Relay, ledger: Ledger, broker: Broker, defer: Defer) -> None:
    """What was confirmed before the broker went away is marked."""
    defer("order-1", "a", "b")
    broker.after = lambda: setattr(broker, "before", away)
    with pytest.raises(TransportError):
        relay.send_waiting()
    assert [m.message.body for m in ledger.mailbox.deferred(Key("shop", "order-1"))] == [b"b"]


def test_unconfirmed_is_sent_again(
    relay: Relay, ledger: Ledger, broker: Broker, clock: ManualClock, defer: Defer
) -> None:
    """Where nobody knows whether it is stored, it is sent again under the same id."""
    [message] = defer("order-1", "a")
    broker.after = away
    with pytest.raises(TransportError):
        relay.send_waiting()
    broker.after = lambda: None
    clock.advance(31)
    assert relay.send_waiting().sent == 1
    assert broker.calls == [[message.id], [message.id]]


def test_the_hold_ends(
    relay: Relay, ledger: Ledger, broker: Broker, clock: ManualClock, defer: Defer
) -> None:
    """When its hold is over a relay publishes nothing more of the batch: another may have it."""
    defer("order-1", "a", "b")
    other = Broker()

    def take_long() -> None:
        broker.after = lambda: None
        clock.advance(31)
        Relay(ledger, other, clock=clock).send_waiting()

    broker.after = take_long
    relay.send_waiting()
    assert broker.arrived() == ["a"]
    assert other.arrived() == ["a", "b"]
    assert state(ledger, "order-1") is State.COMPLETED


@pytest.fixture
def store_is_lost(meddling: MeddlingStore, broker: Broker) -> None:
    """After each publish the store is away, for one call."""

    def raise_it() -> None:
        raise StoreUnavailable("the store is away")

    broker.after = lambda: meddling.once(raise_it)


@pytest.mark.usefixtures("store_is_lost")
def test_marked_when_the_store_is_back(ledger: Ledger, broker: Broker, defer: Defer) -> None:
    """The store away between publishing and marking: marked later, and not sent again."""
    defer("order-1", "a")
    with running(Relay(ledger, broker)):
        wait_until(lambda: state(ledger, "order-1") is State.COMPLETED)
    assert broker.arrived() == ["a"]


@pytest.mark.usefixtures("store_is_lost")
def test_marked_when_stopped(ledger: Ledger, broker: Broker, defer: Defer) -> None:
    """A relay that is stopped meanwhile marks what is published before it ends."""
    defer("order-1", "a")
    stop = threading.Event()
    errors: list[str | None] = []

    def follow(report: RelayReport) -> None:
        errors.append(report.error)
        stop.set()

    assert Relay(ledger, broker).run(stop, follow).sent == 1
    assert errors == ["StoreUnavailable: the store is away"]
    assert state(ledger, "order-1") is State.COMPLETED


# ---- Running -----------------------------------------------------------------------------------


def test_waits_for_the_broker(ledger: Ledger, broker: Broker, defer: Defer) -> None:
    """A running relay says that the broker is away, and goes on when it is back."""
    defer("order-1", "a")
    broker.before = away
    errors: list[str | None] = []
    stop = threading.Event()

    def follow(report: RelayReport) -> None:
        errors.append(report.error)
        if report.error:
            broker.before = lambda: None
        if report.sent:
            stop.set()

    report = Relay(ledger, broker).run(stop, follow)
    assert (report.sent, report.error) == (1, None)
    assert "TransportError: the broker is away" in errors


def test_ends_where_the_broker_refuses(ledger: Ledger, broker: Broker, defer: Defer) -> None:
    """A relay does not wait for what only people can mend; what was published is marked."""
    defer("order-1", "a", "b")

    def refuse() -> None:
        raise BrokerRefused("wrong user or password")

    broker.after = lambda: setattr(broker, "before", refuse)
    with pytest.raises(BrokerRefused, match="password"):
        Relay(ledger, broker).run(threading.Event())
    assert [m.message.body for m in ledger.mailbox.deferred(Key("shop", "order-1"))] == [b"b"]


def test_stops_between_two_messages(ledger: Ledger, broker: Broker, defer: Defer) -> None:
    """A relay that is stopped publishes nothing more, and marks what is published."""
    defer("order-1", "a", "b", "c")
    stop = threading.Event()
    broker.after = stop.set
    assert Relay(ledger, broker).run(stop).sent == 1
    assert [m.message.body for m in ledger.mailbox.deferred(Key("shop", "order-1"))] == [b"b", b"c"]


def test_stops_promptly(ledger: Ledger, broker: Broker) -> None:
    """A relay that waits for messages, however long, is soon stopped."""
    began = threading.Event()
    stop = threading.Event()
    relay = Relay(ledger, broker, poll="1h")
    thread = threading.Thread(target=relay.run, args=[stop, lambda _: began.set()])
    thread.start()
    assert began.wait(LIMIT_S)
    stop.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_tidies(ledger: Ledger, clock: ManualClock, broker: Broker, defer: Defer) -> None:
    """What was handled a while ago, and of which nothing waits, is completed; the rest is not."""
    for number in range(250):
        ledger.handled(granted(ledger.claim(Key("shop", f"lost-{number}"))))
    defer("waits", "a", delay_s=3600)
    clock.advance(61)
    ledger.handled(granted(ledger.claim(Key("shop", "just now"))))
    Relay(ledger, broker).drain(threading.Event())
    assert ledger.counts() == {("shop", State.COMPLETED): 250, ("shop", State.HANDLED): 2}


# ---- Crash points, settings --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch": 0}, "batch: 0 is not a whole number"),
        ({"batch": True}, "batch: True is not a whole number"),
        ({"visibility": "0s"}, "visibility: zero would take"),
        ({"visibility": "soon"}, "visibility: 'soon' is not a duration"),
        ({"tries": 0}, "tries: 0 is not a whole number"),
        ({"backoff": []}, "backoff: give a list"),
        ({"poll": "0s"}, "poll: zero would"),
    ],
)
def test_wrong_settings(
    ledger: Ledger, broker: Broker, settings: dict[str, Any], said: str
) -> None:
    """A setting that cannot be meant is told by its name."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        Relay(ledger, broker, **settings)
