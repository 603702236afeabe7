"""Ready sources: what brokers' own clients send is moved, whatever is killed or cut off."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

import pytest
import redis
from tests.conditions import wait_until
from tests.integration.test_bridge import handled, lines_of
from tests.kills import killed_at
from tests.proxy import Proxy
from tests.senders import AGAIN_S, QUEUE, SENDERS, Sent, send_to_nats, send_to_redis, send_to_sqs
from tests.servers import Server, free_port

from oncely import BridgeReport, ConfigError, Message, TransportError, bridge, open_ledger
from oncely.sources import Source, open_source

KILLS = int(os.environ.get("ONCELY_TEST_BRIDGE_KILLS", "3"))
POINTS = ("bridge_received", "bridge_stored", "bridge_acknowledged")
ACKNOWLEDGES = {"nats": b"$JS.ACK", "redis": b"XACK", "sqs": b"DeleteMessageBatch"}
"""What is in the request that acknowledges."""


class Broker(NamedTuple):
    name: str
    url: str
    send: Callable[[Sent], None]


def broker_of(name: str, request: pytest.FixtureRequest) -> Broker:
    url: str = request.getfixturevalue(f"{name}_url")
    url += f"?visibility={AGAIN_S}s" if name == "redis" else ""
    return Broker(name, url, partial(SENDERS[name], url))


@pytest.fixture(params=[*ACKNOWLEDGES])
def broker(request: pytest.FixtureRequest) -> Broker:
    return broker_of(request.param, request)


def received(source: Source, count: int = 1) -> list[Message]:
    """So many messages, as soon as they come, without their times."""
    found: list[Message] = []

    def is_there() -> bool:
        found.extend(source.receive(count - len(found), 1))
        return len(found) >= count

    wait_until(is_there)
    assert all(message.time for message in found)
    return [replace(message, time=None) for message in found]


@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.parametrize("name", [*SENDERS])
def test_killed_again_and_again(
    name: str, sqlite_ledger_url: str, request: pytest.FixtureRequest
) -> None:
    """Nothing is lost, and the consumer handles each message once: copies have its id."""
    broker, ids = broker_of(name, request), list[str]()

    def work() -> None:
        with (
            closing(open_ledger(sqlite_ledger_url)) as ledger,
            closing(open_source(broker.url, QUEUE)) as source,
        ):
            bridge(source, ledger, drain=True)

    for kill in range(KILLS):
        new = [f"m{kill}-{n}" for n in range(25)]
        broker.send([({"message-id": each}, each.encode()) for each in new])
        ids += new
        assert killed_at(POINTS[kill % 3], work)
    found: list[str] = []

    def are_handled() -> bool:
        # The broker may still believe that a process has its messages.
        work()
        found.extend(message.id for message in handled(sqlite_ledger_url))
        return len(found) >= len(ids)

    wait_until(are_handled)
    assert sorted(found) == sorted(ids)
    with closing(open_source(broker.url, QUEUE)) as source:
        assert not source.receive(1, 0)


def test_messages_stay_as_they_are(broker: Broker) -> None:
    """With the sender's fields, and the id that it has given by whatever header. A message without
    an id has the same when it is delivered again.
    """
    headers = {"message-id": "a", "type": "paid", "source": "shop", "key": "k", "Status": "ü"}
    broker.send([(headers, "é".encode())])
    whole = Message("a", "é".encode(), "paid", {"Status": "ü"}, "shop", key="k")
    with closing(open_source(broker.url, QUEUE)) as source:
        assert received(source) == [whole]
        source.acknowledge()
        broker.send([({"type": "x"}, b"1"), ({"type": "x"}, b"2")])
        first = received(source, 2)
        assert len({message.id for message in first} | {""}) == 3
    with closing(open_source(broker.url, QUEUE)) as source:
        again = received(source, 2)
        assert sorted(again, key=lambda each: each.body) == first


def test_cut_off(broker: Broker, tmp_path: Path) -> None:
    """A broker that is away at the start is an error; later it is waited for. What could not be
    acknowledged is received again, and nothing is left.
    """
    port = int(re.findall(r":(\d+)", broker.url)[0])
    away = broker.url.replace(f":{port}", f":{free_port()}")
    with closing(open_source(away, QUEUE)) as source, pytest.raises(TransportError):
        bridge(source, files=tmp_path, drain=True)
    ids = {f"m{n}" for n in range(25)}
    broker.send([({"message-id": each}, b"x") for each in ids])
    with Proxy(port) as proxy:
        # nats-py leaves a connection open whose server is silent.
        refuses = 0 if broker.name == "nats" else 2
        proxy.cut(ACKNOWLEDGES[broker.name], delivers=False, refuses=refuses)
        url = broker.url.replace(f":{port}", f":{proxy.port}")
        with closing(open_source(url, QUEUE)) as source:
            assert bridge(source, files=tmp_path, drain=True).stored > len(ids)
            assert proxy.cuts == 1
            assert not source.receive(1, 0)
    assert {line["id"] for line in lines_of(tmp_path)} == ids


@pytest.mark.parametrize("name", ["nats", "redis"])
def test_the_server_is_killed(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The bridge waits until it is back, and goes on where it was."""
    server: Server = request.getfixturevalue(f"private_{name}")
    later, stop = [({"message-id": each}, b"") for each in "ab"], Event()
    SENDERS[name](server.url, later[:1])

    def note(report: BridgeReport) -> None:
        if report.error and len(later) > 1:
            server.start()
            SENDERS[name](server.url, [later.pop()])
        elif report.stored and len(later) > 1:
            server.kill()
        elif {line["id"] for line in lines_of(tmp_path)} == {"a", "b"}:
            stop.set()

    with closing(open_source(server.url, QUEUE)) as source:
        bridge(source, files=tmp_path, stop=stop, on_progress=note)


def test_nats_ids(nats_url: str) -> None:
    """Nats-Msg-Id is the id. Where that is not UTF-8, letters of it are lost: there is none."""
    send_to_nats(nats_url, [({"Nats-Msg-Id": "a"}, b""), ({"Nats-Msg-Id": "b\ufffd"}, b"")])
    with closing(open_source(nats_url, f"{QUEUE}/another")) as source:
        first, second = received(source, 2)
    assert first == Message("a", type=f"{QUEUE}.made")
    reason = {"oncely-id": "b\ufffd", "oncely-reason": "the message id is not UTF-8"}
    assert (second.id, second.headers) == ("", reason)


def test_redis_fields(redis_url: str) -> None:
    """Without a field `body`, all fields are the body, if they are text. Groups read apart."""
    send_to_redis(redis_url, [({"id": "a"}, b"\xff"), ({"id": b"\xff"}, b"")])
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(QUEUE, {"id": "b", "total": "30"}, "99999999999999999-1")
        client.xadd(QUEUE, {"id": "c", "total": b"\xff"})
    for group in ("one", "two"):
        with closing(open_source(f"{redis_url}?group={group}", QUEUE)) as source:
            whole, no_id, flat, unreadable = source.receive(9, 1)
            assert (whole.id, whole.body, no_id.id, unreadable.id) == ("a", b"\xff", "", "")
            assert unreadable.headers["oncely-reason"] == "a field is not UTF-8"
            assert (flat.id, flat.json(), flat.time) == ("b", {"id": "b", "total": "30"}, None)


def test_sqs_ids(sqs_url: str) -> None:
    """Of a FIFO queue, groups have ids of their own. A hash of the body is not an id: a queue gives
    it again to an equal message that is sent later.
    """
    sent: Sent = [
        ({"MessageGroupId": "g", "MessageDeduplicationId": "1"}, b"same"),
        ({"MessageGroupId": "h"}, b"same"),
    ]
    settings = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
    send_to_sqs(sqs_url, sent, "orders.fifo", **settings)
    with closing(open_source(sqs_url, "orders.fifo")) as source:
        by_key = {message.key: message.id for message in received(source, 2)}
    assert by_key["g"] == "g/1"
    assert len(by_key["h"]) == 36


@pytest.mark.parametrize(
    ("url", "driver", "extra", "module"),
    [
        ("nats://host", "nats", "nats", "jetstream"),
        ("sqs://eu-central-1", "boto3", "sqs", "sqs"),
        ("rediss://host", "redis", "redis", "redis_streams"),
    ],
)
def test_missing_driver(
    url: str, driver: str, extra: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is not installed is named, with what installs it."""
    monkeypatch.delitem(sys.modules, f"oncely.sources.{module}", raising=False)
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(ConfigError, match=rf"{driver} is not .*pip install 'oncely\[{extra}\]'"):
        open_source(url, QUEUE)


@pytest.mark.parametrize("url", ["redis://host/0?nothing=1", "sqs://x?endpoint=y", "sqs://x?a=b"])
def test_mistakes(url: str) -> None:
    """They are told when the source is opened."""
    with pytest.raises(ConfigError):
        open_source(url, QUEUE)
