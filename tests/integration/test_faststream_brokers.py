# mypy: disable-error-code="untyped-decorator"
"""The adapter for FastStream on brokers without dead letters, with workers that are killed."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker as ConfluentBroker
from faststream.exceptions import NackMessage, RejectMessage
from faststream.kafka import KafkaBroker, TestKafkaBroker
from faststream.nats import ConsumerConfig, JStream, NatsBroker, PullSub
from tests.conditions import wait_until
from tests.integration.adapting import Effects, process
from tests.meddling import away
from tests.servers import create_topic

import oncely
from oncely import ops
from oncely.adapters.attempt import StartError
from oncely.adapters.faststream import once_middleware
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger


def subscribed(kind: str, url: str, queue: str, once: Any = ()) -> tuple[Any, Any]:
    """A broker, and what subscribes a function to the queue there."""
    if kind in ("jetstream", "core"):
        broker: Any = NatsBroker(url, middlewares=once)
        at: dict[str, Any] = {"stream": JStream(queue), "config": ConsumerConfig(ack_wait=2)}
        stream = {"durable": "shop", "pull_sub": PullSub(), **at}
        return broker, broker.subscriber(queue, **(stream if kind == "jetstream" else {}))
    made: Any = ConfluentBroker if kind == "confluent" else KafkaBroker
    broker = made(url.removeprefix("kafka://"), middlewares=once)
    options = {"group_id": "shop", "auto_offset_reset": "earliest", "session_timeout_ms": 6_000}
    policy = AckPolicy.NACK_ON_ERROR if kind == "kafka again" else AckPolicy.ACK
    return broker, broker.subscriber(queue, ack_policy=policy, **options)


async def work(ledger_url: str, folder: str, kind: str, url: str, queue: str) -> None:
    """Each message has its effect; "fail N" fails N times, and "hang" does not end at first."""
    ledger, effects = oncely.open_ledger(ledger_url), Effects(folder)
    once = once_middleware(ledger, "shop", policy=oncely.Policy(lease="1s"))
    broker, subscriber = subscribed(kind, url, queue, [once])

    @subscriber
    async def charge(body: str) -> None:
        times = effects.add(oncely.current().claim.key.message_id)
        if body.startswith("fail") and times <= int(body[5:]):
            raise ValueError("no such account")
        if body == "hang" and times == 1:
            await asyncio.Event().wait()

    await once.start(broker)
    await FastStream(broker).run()


EVENT = {"ce_specversion": "1.0", "ce_id": "7", "ce_type": "placed", "ce_source": "shop"}


@pytest.mark.in_turn("other brokers of frameworks")
@pytest.mark.parametrize("kind", ["kafka", "kafka again", "confluent", "jetstream", "core"])
def test_messages(
    kind: str, request: pytest.FixtureRequest, sqlite_ledger_url: str, tmp_path: Path
) -> None:
    """Each is handled once; what fails or has no id is a dead letter, which the worker sends again
    when it is retried; what a killed worker had in hand is delivered again.
    """
    url = request.getfixturevalue("nats_url" if kind in ("jetstream", "core") else "kafka")
    queue, ledger, effects = (
        f"q{uuid4().hex}",
        oncely.open_ledger(sqlite_ledger_url),
        Effects(tmp_path),
    )
    if url.startswith("kafka"):
        create_topic(url.removeprefix("kafka://"), queue, 1)
    command = ("tests.integration.test_faststream_brokers", sqlite_ledger_url, str(tmp_path))

    async def send(body: str, headers: dict[str, str]) -> None:
        sender, _ = subscribed(kind, url, queue)
        async with sender:
            await sender.publish(body, queue, headers=headers)

    def publish(body: str, **headers: str) -> Any:
        asyncio.run(send(body, {name.replace("_id", "-id"): headers[name] for name in headers}))

    def letters() -> dict[str, int]:
        return {each.key.message_id: each.id for each in ledger.dead("shop.charge")}

    def is_completed(id_: str) -> bool:
        return any(each.key.message_id == id_ for each in ledger.scan(state=State.COMPLETED))

    with process(*command, kind, url, queue, environment={}):
        # NATS alone keeps nothing for a worker that is still to come.
        wait_until(lambda: [publish("tea", message_id="a"), is_completed("a")][1], pause_s=0.5)
        publish("tea", message_id="a")
        asyncio.run(send("tea", EVENT))
        publish("without an id")
        fails = 5 if kind == "kafka again" else 1
        publish(f"fail {fails}", message_id="b")
        publish(f"fail {fails}", **{"message_id": "d", "Nats-Msg-Id": "d"})
        wait_until(lambda: letters().keys() >= {"b", "d"})
        ids = [letters()[id_] for id_ in ("bd" if kind in ("jetstream", "kafka again") else "b")]
        changed = ops.retry_letters(ledger, ids, by="ann")
        assert "due now: a worker of FastStream sends it to" in changed.next_steps[ids[0]]
        wait_until(lambda: is_completed("b") and not ledger.mailbox.of(Key("shop.charge", "b")))
        if kind == "jetstream":  # It drops what it takes for a duplicate.
            key = Key("shop.charge", "d")
            wait_until(lambda: "Nats-Msg-Id" in (ledger.mailbox.of(key)[0].error or ""))
        elif kind != "kafka again":  # Its sender sends it again.
            publish(f"fail {fails}", message_id="d")
        wait_until(lambda: [*letters()] == [""])
        assert is_completed('["shop","7"]')
        if kind != "core":
            publish("hang", message_id="c")
            wait_until(lambda: effects.count("c"))
    if kind != "core":
        with process(*command, kind, url, queue, environment={}):
            wait_until(lambda: is_completed("c"))
    assert [*map(effects.count, "abc")] == [1, fails + 1, 0 if kind == "core" else 2]
    ledger.close()


@pytest.mark.parametrize(
    ("broker", "options", "why"),
    [
        (KafkaBroker, {}, "charge: under AckPolicy.ACK_FIRST a message is lost"),
        (
            ConfluentBroker,
            {"group_id": "g", "ack_policy": AckPolicy.NACK_ON_ERROR},
            "NACK_ON_ERROR",
        ),
        (NatsBroker, {"stream": "s", "ack_policy": AckPolicy.ACK_FIRST}, "under AckPolicy.MANUAL"),
        (KafkaBroker, {"ack_policy": AckPolicy.ACK, "batch": True}, "a batch has no id"),
    ],
)
def test_what_would_lose_messages(broker: Any, options: Any, why: str, ledger: Ledger) -> None:
    """A worker does not start there, and says in one line what to write."""
    once = once_middleware(ledger, "shop")
    made = broker(middlewares=[once])

    @made.subscriber("orders", **options)
    async def charge(body: str) -> None: ...

    with pytest.raises(StartError, match=why):
        asyncio.run(once.start(made))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("error", "policy", "letters", "count"),
    [
        (ValueError("no"), AckPolicy.ACK_FIRST, ["StartError"], 0),
        (ValueError("no"), AckPolicy.ACK, ["ValueError"], 2),
        (ValueError("no"), AckPolicy.NACK_ON_ERROR, [], 1),
        (RejectMessage(), AckPolicy.NACK_ON_ERROR, ["RejectMessage"], 2),
        (NackMessage(), AckPolicy.ACK, [], 1),
    ],
)
def test_what_is_kept(
    error: Exception, policy: AckPolicy, letters: Any, count: int, meddling: Any, ledger: Ledger
) -> None:
    """What the broker forgets is a dead letter; it is not acknowledged while the ledger is away."""
    broker, runs = KafkaBroker(middlewares=[once_middleware(ledger, "shop")]), list[str]()

    def be_away() -> None:
        if meddling.calls[-1] == "transaction":
            meddling.meddle = lambda: None
            away()

    @broker.subscriber("orders", ack_policy=policy)
    async def charge(body: str) -> None:
        meddling.meddle = meddling.meddle if runs else be_away
        runs.append(body)
        raise error

    async def publish() -> None:
        async with TestKafkaBroker(broker):
            await broker.publish("tea", "orders", headers={"message-id": "a"}, key=b"k")

    with suppress(ValueError, StartError):
        asyncio.run(publish())
    kept = [(m.reason.split(":")[0], m.message.type, m.message.key) for m in ledger.dead()]
    assert kept == [(reason, "orders", "k") for reason in letters]
    assert len(runs) == count


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
