"""RedisStore keeps its word when servers fail, connections break, and memory is full."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import pytest
from redis import Redis as Client
from tests.processes import claim_all, exit_of, forked, key_of
from tests.proxy import Proxy
from tests.records import Swap, granted, insert, record_of, swap
from tests.servers import Redis

from oncely.core.commands import Duplicate, Granted
from oncely.core.errors import ConfigError, ReplyLost, StoreDenied, StoreError, StoreUnavailable
from oncely.core.record import Claim, Key, Record, State
from oncely.ledger.ledger import Ledger
from oncely.stores import redis_server
from oncely.stores.redis import RedisStore, open_redis
from oncely.stores.redis_server import RedisServer
from oncely.stores.store import Query

_DEADLINE_S = 60.0


@pytest.fixture
def proxy(private_redis: Redis) -> Iterator[Proxy]:
    """A way to a server that a test can cut."""
    with Proxy(private_redis.port) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: Proxy) -> RedisStore:
    """A store behind `proxy`, whose server knows its scripts."""
    store = open_redis(f"redis://127.0.0.1:{proxy.port}/0")
    warm = _new("warm")
    insert(store, [warm])
    swap(store, [Swap(warm, None)])
    store.load(())
    return store


@contextmanager
def _settings(server: Redis, **settings: str) -> Iterator[None]:
    """Settings that the server has for as long as the block."""
    with Client.from_url(server.url, decode_responses=True) as client:
        before = {name: client.config_get(name)[name] for name in settings}
        client.config_set(*(word for setting in settings.items() for word in setting))
        yield
        client.config_set(*(word for setting in before.items() for word in setting))


# ---- Servers that go away ----------------------------------------------------------------------


def test_server_starts_anew(private_redis: Redis, key: Key) -> None:
    """A restart loses connections and scripts, and nobody notices."""
    ledger = Ledger(open_redis(private_redis.url))
    claim = granted(ledger.claim(key))
    private_redis.restart()
    ledger.complete(claim)
    with Client.from_url(private_redis.url) as client:
        client.script_flush()
    assert isinstance(ledger.claim(key), Duplicate)


def test_server_away(private_redis: Redis, key: Key) -> None:
    """While the server is away every call raises StoreUnavailable; afterwards all is well."""
    store = open_redis(private_redis.url)
    ledger = Ledger(store)
    private_redis.stop()
    calls: list[Callable[[], object]] = [lambda: ledger.claim(key), store.problems]
    for call in calls:
        with pytest.raises(StoreUnavailable, match=r"redis://127.0.0.1:.* Connection refused"):
            call()
    private_redis.start()
    granted(ledger.claim(key))


def test_server_away_when_opened(private_redis: Redis, key: Key) -> None:
    """What cannot be looked at when a store is opened, is at its first use."""
    private_redis.stop()
    ledger = Ledger(open_redis(private_redis.url))
    private_redis.start()
    with (
        _settings(private_redis, **{"maxmemory-policy": "allkeys-lru"}),
        pytest.raises(ConfigError, match="noeviction"),
    ):
        ledger.claim(key)
    granted(ledger.claim(key))


def test_server_back_in_time(private_redis: Redis, key: Key) -> None:
    """A server that is away for a moment costs patience, and no error."""
    ledger = Ledger(open_redis(private_redis.url))
    private_redis.stop()
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(ledger.claim, key)
        private_redis.start()
        granted(outcome.result())


def test_server_that_hangs_up() -> None:
    """A connection that cannot be made is tried six times, and by nobody else once more."""
    with _hanging_up() as (url, guests):
        with pytest.raises(StoreUnavailable):
            insert(RedisStore(url), [_new("1")])
        assert len(guests) == 6


def test_connections_that_were_ended_while_idle(private_redis: Redis, key: Key) -> None:
    """Where the server has ended all that stood idle in the pool, as its `timeout` does, each call
    is done on a new one.
    """
    ledger = Ledger(open_redis(private_redis.url))
    claims: list[Claim] = []
    calls: list[Callable[[], object]] = [
        lambda: claims.append(granted(ledger.claim(key))),
        lambda: ledger.extend(claims[0], "5m"),
        ledger.counts,
        lambda: ledger.complete(claims[0]),
        lambda: ledger.purge("0s"),
    ]
    with Client.from_url(private_redis.url) as client:
        for call in calls:
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(ledger.find, [key] * 40))
            client.client_kill_filter(_type="normal", skipme=True)
            call()
    assert ledger.find(key) is None


def test_connections_of_a_replica_that_is_promoted(private_redis: Redis, key: Key) -> None:
    """Connections that were opened while the server was a replica, and read-only, do after that."""
    ledger = Ledger(open_redis(private_redis.url))
    with Client.from_url(private_redis.url) as client:
        client.replicaof("127.0.0.1", "1")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ledger.find, [key] * 40))
            refused = threads.submit(ledger.claim, key)
            with pytest.raises(StoreUnavailable, match=r"read only|READONLY"):
                refused.result(_DEADLINE_S)
            client.replicaof("NO", "ONE")
            for number in range(4):
                granted(threads.submit(ledger.claim, Key("billing", str(number))).result())


# ---- Connections that break --------------------------------------------------------------------


@pytest.mark.parametrize("delivers", [True, False])
def test_reply_to_a_write_is_lost(store: RedisStore, proxy: Proxy, *, delivers: bool) -> None:
    """A write whose reply is lost is not sent again: nobody knows whether it was done."""
    record = _new("1")
    proxy.cut(b"EVALSHA", delivers=delivers)
    with pytest.raises(ReplyLost):
        insert(store, [record])
    assert (record.key in store.load([record.key]).records) is delivers
    insert(store, [record])
    proxy.cut(b"EVALSHA", delivers=delivers)
    with pytest.raises(ReplyLost):
        swap(store, [Swap(record, None)])
    assert (record.key in store.load([record.key]).records) is not delivers
    assert proxy.cuts == 2


def test_reply_to_a_read_is_lost(store: RedisStore, proxy: Proxy) -> None:
    """What only reads, or purges, is asked again."""
    record = _new("1")
    insert(store, [record])
    calls: list[Callable[[], object]] = [
        lambda: record.key in store.load([record.key]).records,
        lambda: store.tallies().keys() == {("billing", State.PROCESSING)},
        lambda: len(store.scan(Query())) == 1,
        lambda: store.purge(Query(), [State.COMPLETED]) == 0,
        lambda: store.problems() != [],
    ]
    for cuts, call in enumerate(calls, 1):
        proxy.cut(b"INFO" if call is calls[-1] else b"EVALSHA", delivers=True)
        assert call()
        assert proxy.cuts == cuts


@pytest.mark.parametrize("delivers", [True, False])
def test_claim_whose_reply_is_lost(store: RedisStore, proxy: Proxy, *, delivers: bool) -> None:
    """Whether it was stored or not, the claim is granted, and completed, exactly once."""
    ledger, key = Ledger(store), Key("billing", "1")
    for _ in range(2):
        proxy.cut(b"EVALSHA", delivers=delivers)
        claim = granted(ledger.claim(key))
        proxy.cut(b"EVALSHA", delivers=delivers)
        ledger.fail(claim, "no")
    proxy.cut(b"EVALSHA", delivers=delivers)
    claim = granted(ledger.claim(key))
    assert (claim.fence, claim.attempts) == (3, 3)
    proxy.cut(b"EVALSHA", delivers=delivers)
    ledger.complete(claim, "done")
    record = record_of(ledger, key)
    assert (record.state, record.result) == (State.COMPLETED, "done")
    assert proxy.cuts == 6


def test_server_that_does_not_answer(private_redis: Redis, key: Key) -> None:
    """A server that stalls beyond the timeout is asked what it did, and the outcome is right."""
    ledger = Ledger(open_redis(f"{private_redis.url}?socket_timeout=0.1"))
    claim = granted(ledger.claim(key))
    with Client.from_url(private_redis.url) as client:
        client.client_pause(600)
        ledger.complete(claim)
        assert isinstance(ledger.claim(key), Duplicate)


def test_interrupted_call(private_redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply to a call that was interrupted is never taken for that to the next."""
    store = open_redis(private_redis.url)

    def send_only(connection: Any, *words: str) -> None:
        connection.send_command(*words)
        raise KeyboardInterrupt

    with Client.from_url(private_redis.url) as client, monkeypatch.context() as patch:
        client.client_pause(200)
        patch.setattr(redis_server, "_call", send_only)
        with pytest.raises(KeyboardInterrupt):
            insert(store, [_new("1")])
    assert store.load(()).records == {}


# ---- Servers that refuse -----------------------------------------------------------------------


def test_memory_is_full(private_redis: Redis) -> None:
    """Full memory refuses new claims, storing none; what was claimed can still be completed."""
    ledger = Ledger(open_redis(private_redis.url))
    claims = [granted(outcome) for outcome in ledger.claim_many([key_of(n) for n in range(50)])]
    fresh = [key_of(n) for n in range(50, 1_000)]
    with _settings(private_redis, maxmemory="1mb"):
        with pytest.raises(StoreUnavailable, match="memory"):
            ledger.claim_many(fresh)
        assert sum(ledger.counts().values()) == 50
        ledger.complete_many(claims)
        assert ledger.counts() == {("processes", State.COMPLETED): 50}
    assert all(isinstance(outcome, Granted) for outcome in ledger.claim_many(fresh))


@pytest.mark.parametrize(
    ("answer", "raised", "asked"),
    [
        ("LOADING Redis is loading the dataset in memory", StoreUnavailable, 6),
        ("BUSY Redis is busy running a script.", StoreUnavailable, 6),
        ("READONLY You can't write against a read only replica.", StoreUnavailable, 6),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreUnavailable, 1),
        ("ERR Error running script: -OOM command not allowed", StoreUnavailable, 1),
        ("MISCONF Redis is configured to save RDB snapshots", StoreUnavailable, 1),
        ("NOREPLICAS Not enough good replicas to write.", StoreUnavailable, 1),
        ("NOAUTH Authentication required.", StoreError, 1),
        ("NOPERM this user has no permissions", StoreDenied, 1),
        ("WRONGTYPE Operation against a key", StoreError, 1),
        ("ERR password=geheim is wrong", StoreError, 1),
    ],
)
def test_refusals(answer: str, raised: type[Exception], asked: int) -> None:
    """What passes by itself is asked again, the rest is told at once; no driver's error escapes."""
    with _answering(answer) as (url, count), pytest.raises(StoreError) as error:
        RedisServer(url).ask("PING")
    assert type(error.value) is raised
    assert "geheim" not in str(error.value)
    assert count["PING"] == asked


def test_fork_with_open_connections(redis_url: str, key: Key) -> None:
    """A child forked while connections are open has its own, and so does its parent."""
    store = open_redis(redis_url)
    ledger = Ledger(store)
    claim = granted(ledger.claim(key))
    child = forked(lambda: claim_all(ledger, 500, batch=1))
    assert sum(store.load([key]).records[key].fence for _ in range(500)) == 500
    ledger.complete(claim)
    assert exit_of(child) == 0
    processing = (key_of(0).consumer, State.PROCESSING)
    assert ledger.counts() == {(key.consumer, State.COMPLETED): 1, processing: 500}


def test_fork_while_the_pool_is_locked(redis_url: str, key: Key) -> None:
    """A child never waits for a lock that a thread of its parent held at the fork."""
    store = open_redis(redis_url)

    def load() -> None:
        worker = Thread(target=store.load, args=[[key]], daemon=True)
        worker.start()
        worker.join(_DEADLINE_S)
        assert not worker.is_alive()

    with store._server._pool._lock:
        child = forked(load)
    assert exit_of(child) == 0


def _new(message_id: str) -> Record:
    key = Key("billing", message_id)
    return Record(key, State.PROCESSING, 1, 1, 0.0, 0.0, 60.0, version=5)


@contextmanager
def _hanging_up() -> Iterator[tuple[str, list[socket.socket]]]:
    """The URL of a server that hangs up on everyone, and on whom it did."""
    guests: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                guests.append(listener.accept()[0])
                guests[-1].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=serve, args=[listener], daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0", guests
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def _answering(error: str) -> Iterator[tuple[str, Counter[str]]]:
    """The URL of a server that answers every command with `error`, and what it was asked."""
    asked: Counter[str] = Counter()

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                while request := client.recv(1 << 16):
                    asked.update(["PING"] if b"PING" in request else [])
                    answer = f"-{error}" if b"PING" in request else "+OK"
                    client.sendall(f"{answer}\r\n".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=serve, args=[listener], daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0", asked
        listener.shutdown(socket.SHUT_RDWR)
