"""Ready sources: what brokers' own clients send is moved, whatever is killed or cut off."""

import asyncio
import gc
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import nats
import pytest
import redis
from tests.conditions import wait_until
from tests.integration.test_bridge import handled, lines_of
from tests.kills import killed_at
from tests.proxy import Proxy
from tests.servers import free_port

from oncely import ConfigError, Message, TransportError, bridge, open_ledger, open_transport
from oncely.sources import Source, open_source

KILLS = int(os.environ.get("ONCELY_TEST_BRIDGE_KILLS", "3"))
POINTS = ("bridge_received", "bridge_stored", "bridge_acknowledged")
ACKNOWLEDGES = {"nats": b"$JS.ACK", "redis": b"XACK", "sqs": b"DeleteMessageBatch"}
"""What is in the request that acknowledges."""

AGAIN_S = 2
"""How long brokers wait for an acknowledgement before they deliver a message again."""

Sent = Sequence[tuple[Mapping[str, Any], bytes]]
"""Headers and bodies."""


def send_to_rabbitmq(url: str, queue: str, sent: Sent) -> None:
    with closing(open_transport(url)) as transport:
        transport.publish(queue, [Message(told["message-id"], body) for told, body in sent])


def send_to_nats(url: str, queue: str, sent: Sent) -> None:
    async def send() -> None:
        client = await nats.connect(url)
        stream = client.jetstream()
        await stream.add_stream(name=queue, subjects=[queue])
        await stream.add_consumer(queue, durable_name="oncely", ack_wait=AGAIN_S)
        for headers, body in sent:
            await stream.publish(queue, body, headers=dict(headers))
        await client.close()

    asyncio.run(send())


def send_to_redis(url: str, queue: str, sent: Sent) -> None:
    with redis.Redis.from_url(url.partition("?")[0]) as client:
        for headers, body in sent:
            client.xadd(queue, {**headers, "body": body})


def send_to_sqs(url: str, queue: str, sent: Sent, **settings: str) -> None:
    """Settings are the queue's. To a FIFO queue, headers are arguments of `send_message`."""
    endpoint = url.partition("endpoint=")[2]
    with closing(boto3.client("sqs", region_name="eu-central-1", endpoint_url=endpoint)) as client:
        settings["VisibilityTimeout"] = str(AGAIN_S)
        at = client.create_queue(QueueName=queue, Attributes=settings)["QueueUrl"]
        for headers, body in sent:
            told = {n: {"DataType": "String", "StringValue": v} for n, v in headers.items()}
            more = headers if "FifoQueue" in settings else {"MessageAttributes": told}
            client.send_message(QueueUrl=at, MessageBody=body.decode(), **more)


SENDERS: Mapping[str, Callable[[str, str, Sent], None]] = {
    "rabbitmq": send_to_rabbitmq,
    "nats": send_to_nats,
    "redis": send_to_redis,
    "sqs": send_to_sqs,
}


@pytest.fixture
def queue() -> str:
    return f"q{uuid4().hex}"


@pytest.fixture(params=[*ACKNOWLEDGES])
def broker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(broker: str, request: pytest.FixtureRequest) -> str:
    more = f"?visibility={AGAIN_S}s" if broker == "redis" else ""
    return f"{request.getfixturevalue(f'{broker}_url')}{more}"


def received(source: Source, count: int) -> list[Message]:
    """So many messages, as soon as they come, without their times."""
    found: list[Message] = []

    def is_there() -> bool:
        found.extend(source.receive(count - len(found), 1))
        return len(found) >= count

    wait_until(is_there)
    assert all(message.time for message in found)
    return sorted((replace(each, time=None) for each in found), key=lambda each: each.body)


@pytest.mark.in_turn("bridges")
@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.parametrize("broker", [*SENDERS])
def test_killed_again_and_again(broker: str, url: str, queue: str, sqlite_ledger_url: str) -> None:
    """Nothing is lost, and the consumer handles each message once: copies have its id."""

    def work() -> None:
        with (
            closing(open_ledger(sqlite_ledger_url)) as ledger,
            closing(open_source(url, queue)) as source,
        ):
            bridge(source, ledger, drain=True)

    ids, found = list[str](), list[str]()
    for kill in range(KILLS):
        new = [f"m{kill}-{n}" for n in range(25)]
        SENDERS[broker](url, queue, [({"message-id": each}, b"x") for each in new])
        ids += new
        assert killed_at(POINTS[kill % 3], work)

    def are_handled() -> bool:
        # The broker may still believe that a process has its messages.
        work()
        found.extend(message.id for message in handled(sqlite_ledger_url))
        return len(found) >= len(ids)

    wait_until(are_handled)
    assert sorted(found) == sorted(ids)


def test_messages_stay_as_they_are(broker: str, url: str, queue: str) -> None:
    """With the sender's fields. A message without an id has the same when it is delivered again."""
    told = {"message-id": "a", "type": "paid", "source": "shop", "key": "k", "Status": "ü"}
    SENDERS[broker](
        url, queue, [(told, "é".encode()), ({"type": "x"}, b"1"), ({"type": "x"}, b"2")]
    )
    with closing(open_source(url, queue)) as source:
        first = received(source, 3)
    assert first[2] == Message("a", "é".encode(), "paid", {"Status": "ü"}, "shop", key="k")
    assert len({message.id for message in first} | {""}) == 4
    with closing(open_source(url, queue)) as source:
        assert received(source, 3) == first


@pytest.mark.in_turn("bridges")
# nats-py leaves the connection to a silent server to the collector.
@pytest.mark.filterwarnings("ignore:unclosed")
def test_cut_off(broker: str, url: str, queue: str, tmp_path: Path) -> None:
    """A broker that is away at the start is an error; later it is waited for. What could not be
    acknowledged is received again, and nothing is left.
    """
    [port] = re.findall(r":(\d+)", url)
    away = open_source(url.replace(port, str(free_port())), queue)
    with closing(away), pytest.raises(TransportError):
        bridge(away, files=tmp_path, drain=True)
    ids = {f"m{n}" for n in range(25)}
    SENDERS[broker](url, queue, [({"message-id": each}, b"x") for each in ids])
    with Proxy(int(port)) as proxy:
        proxy.cut(ACKNOWLEDGES[broker], delivers=False, refuses=2)
        with closing(open_source(url.replace(port, str(proxy.port)), queue)) as source:
            assert bridge(source, files=tmp_path, drain=True).stored > len(ids)
            assert not source.receive(1, 0)
    assert {line["id"] for line in lines_of(tmp_path)} == ids
    gc.collect()


def test_ids_of_nats(nats_url: str, queue: str) -> None:
    """Nats-Msg-Id is the id. Where that is not UTF-8, letters of it are lost: there is none."""
    sent = [({"Nats-Msg-Id": "a"}, b"1"), ({"Nats-Msg-Id": "b\ufffd"}, b"2")]
    send_to_nats(nats_url, queue, sent)
    with closing(open_source(nats_url, f"{queue}/another")) as source:
        first, second = received(source, 2)
    assert first == Message("a", b"1", queue)
    told = {"oncely-id": "b\ufffd", "oncely-reason": "the message id is not UTF-8"}
    assert (second.id, second.headers) == ("", told)


@pytest.mark.parametrize("terms", [{"ack_policy": "none"}, {"deliver_subject": "pushed"}])
def test_other_consumers_of_nats(nats_url: str, queue: str, terms: dict[str, Any]) -> None:
    """One that would lose messages, or that is not to be pulled, is refused."""

    async def make() -> None:
        async with await nats.connect(nats_url) as client:
            await client.jetstream().add_consumer(queue, durable_name="other", **terms)

    send_to_nats(nats_url, queue, [])
    asyncio.run(make())
    with closing(open_source(nats_url, f"{queue}/other")) as source, pytest.raises(ConfigError):
        source.receive(1, 1)


def test_fields_of_redis(redis_url: str, queue: str) -> None:
    """Without a field `body`, all fields are the body, if they are text. Groups read apart."""
    send_to_redis(redis_url, queue, [({"id": "a"}, b"\xff"), ({"id": b"\xff"}, b"")])
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(queue, {"id": "b", "total": "30"}, "99999999999999999-1")
        client.xadd(queue, {"id": "c", "total": b"\xff"})
    for group in ("one", "two"):
        with closing(open_source(f"{redis_url}?group={group}", queue)) as source:
            whole, no_id, flat, unreadable = source.receive(9, 1)
        assert (whole.id, whole.body, no_id.id, unreadable.id) == ("a", b"\xff", "", "")
        assert unreadable.headers["oncely-reason"] == "a field is not UTF-8"
        assert (flat.id, flat.json(), flat.time) == ("b", {"id": "b", "total": "30"}, None)


def test_ids_of_sqs(sqs_url: str, queue: str) -> None:
    """Of a FIFO queue, groups have ids of their own. A hash of the body is not an id: a queue gives
    it again to an equal message that is sent later.
    """
    sent: Sent = [
        ({"MessageGroupId": "g", "MessageDeduplicationId": "1"}, b"x"),
        ({"MessageGroupId": "h"}, b"x"),
    ]
    settings = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
    send_to_sqs(sqs_url, f"{queue}.fifo", sent, **settings)
    with closing(open_source(sqs_url, f"{queue}.fifo")) as source:
        ids = {message.key: message.id for message in received(source, 2)}
    assert (ids["g"], len(ids["h"])) == ("g/1", 36)


@pytest.mark.parametrize("url", ["redis://x?nothing=1", "sqs://x?endpoint=y", "sqs://x?a=b"])
def test_mistakes(url: str) -> None:
    """They are told when the source is opened."""
    with pytest.raises(ConfigError):
        open_source(url, "q")
