"""RedisStore: its statements; what it keeps, where, and on which servers."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis as Client
from tests.conformance.store_suite import StatementsOfRecords
from tests.logs import events_in
from tests.records import Swap, granted, insert, record_of, swap
from tests.servers import Redis

from oncely.core.commands import Busy
from oncely.core.errors import ConfigError, StoreError
from oncely.core.record import Key, Record, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores import redis_server
from oncely.stores.redis import RedisStore, open_redis
from oncely.stores.store import Query, Store
from oncely.testing import ManualClock

_FIT = {"redis_mode": "standalone", "maxmemory_policy": "noeviction", "aof_enabled": "1"}


class TestRedisStore(StatementsOfRecords):
    """Statements of RedisStore, which has no transactions."""

    has_order_of_ids = False

    @pytest.fixture
    def store(self, clock: ManualClock, redis_url: str) -> Store:
        return RedisStore(redis_url, clock=clock)


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    """What an operator sees of the database, with redis-cli."""
    with Client.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def store(clock: ManualClock, redis_url: str) -> RedisStore:
    """A store that reads `clock`."""
    return RedisStore(redis_url, clock=clock)


@pytest.fixture
def ledger(store: RedisStore) -> Ledger:
    """The ledger over `store`."""
    return Ledger(store)


# ---- What is kept, and where -------------------------------------------------------------------


def test_times_are_the_servers(redis_url: str, key: Key) -> None:
    """Without a clock of a test's own, the server's clock is asked, to the microsecond."""
    ledger = Ledger(RedisStore(redis_url))
    before = time.time()
    granted(ledger.claim(key, "60s"))
    record = record_of(ledger, key)
    assert before - 1 < record.first_seen < time.time() + 1
    assert record.first_seen == record.last_seen == round(record.last_seen, 6)
    assert record.lease_until == pytest.approx(record.last_seen + 60, abs=1e-5)
    assert ledger.now() > record.last_seen


def test_operators_can_read(ledger: Ledger, client: Client, key: Key) -> None:
    """A record is a hash under the documented key, with the names of the table's columns."""
    ledger.fail(granted(ledger.claim(key, fingerprint="f" * 64)), "no")
    version = client.hget("processed_messages:7:billing:abc-123", "version")
    assert client.hgetall("processed_messages:7:billing:abc-123") == {
        "status": "failed",
        "attempts": "1",
        "fence": "1",
        "first_processed_at": "1700000000.000000",
        "last_processed_at": "1700000000.000000",
        "fingerprint": "f" * 64,
        "metadata": '{"error": "no"}',
        "version": version,
    }


def test_removed_by_hand(ledger: Ledger, store: RedisStore, client: Client, key: Key) -> None:
    """What an operator has deleted may run again, and no scan, tally or purge mistakes it."""
    ledger.complete(granted(ledger.claim(key)))
    client.delete("processed_messages:7:billing:abc-123")
    granted(ledger.claim(key))
    assert list(ledger.scan(state=State.COMPLETED)) == []
    assert store.purge(Query(), [State.COMPLETED]) == 1
    assert ledger.counts() == {(key.consumer, State.PROCESSING): 1}
    assert ledger.find(key) is not None


def test_load_tells_an_early_time(redis_url: str) -> None:
    """No record of a load of many is older than its clock: what seems over by then, is."""
    ticks = itertools.count(1)
    store = RedisStore(redis_url, clock=lambda: float(next(ticks)))
    insert(store, [_new("1")])
    assert next(ticks) == 2
    assert store.load([Key("billing", str(n)) for n in range(2_500)]).now == 3
    assert next(ticks) == 6


def test_prefixes_do_not_meet(redis_url: str, key: Key) -> None:
    """Ledgers under two prefixes share a database, and never see each other's records."""
    one, two = (Ledger(RedisStore(redis_url, prefix)) for prefix in ("one", "two"))
    one.complete(granted(one.claim(key)))
    granted(two.claim(key))
    assert one.counts() == {(key.consumer, State.COMPLETED): 1}
    assert two.counts() == {(key.consumer, State.PROCESSING): 1}


def test_indexes_say_what_records_say(store: RedisStore, client: Client) -> None:
    """Whatever was written, the indexes agree with the records; without records nothing is left."""
    draw = random.Random(7)
    for _ in range(60):
        _write_at_random(store, draw)
        records = _all_records(store)
        assert {
            name: (tally.count, tally.duplicates, tally.lease_over)
            for name, tally in store.tallies().items()
        } == _tallied(records, store.load(()).now)
        assert set(store.scan(Query(limit=1_000))) == set(records)
    swap(store, [Swap(record, None) for record in _all_records(store)])
    assert client.keys() == ["processed_messages:horizons"]


def test_scan_beyond_a_page(store: RedisStore, clock: ManualClock) -> None:
    """A scan of many pages and groups finds all that fit, longest unseen first."""
    for start in range(0, 3_000, 500):
        consumers = [f"consumer-{n % 3}" for n in range(start, start + 500)]
        insert(store, [_new(str(start + n), consumer) for n, consumer in enumerate(consumers)])
        clock.advance(1)
    found = store.scan(Query(limit=5_000))
    assert len({record.key for record in found}) == 3_000
    assert [record.last_seen for record in found] == sorted(record.last_seen for record in found)
    assert len(store.scan(Query(text="99"))) == sum("99" in str(n) for n in range(3_000))
    assert store.purge(Query(text="99", older_than_s=0.5), [State.PROCESSING]) == 57
    assert len(store.scan(Query(older_than_s=0.5, limit=5_000))) == 3_000 - 57


def test_scan_while_a_record_moves(
    store: RedisStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record seen again while pages are read neither ends the scan, nor stands in it twice."""
    records = [_new(f"{n:03}") for n in range(250)]
    insert(store, records)
    clock.advance(1)
    run = store._run
    last_of_page = [Swap(records[99], records[99]._replace(version=9))]

    def run_and_move(*args: Any, **options: Any) -> Any:
        answer = run(*args, **options)
        if answer.startswith('[["1700000000"'):
            monkeypatch.setattr(store, "_run", run)
            assert swap(store, last_of_page) == {records[99].key}
        return answer

    monkeypatch.setattr(store, "_run", run_and_move)
    found = [record.key for record in store.scan(Query(limit=1_000))]
    assert store._run == run
    assert sorted(found) == [record.key for record in records]


def test_size(store: RedisStore, client: Client) -> None:
    """The size is what the server says of all keys together, by a sample."""
    insert(store, [_new(str(n), metadata={"n": "x" * (n % 50)}) for n in range(500)])
    exact = sum(client.memory_usage(name) or 0 for name in client.scan_iter(count=1_000))
    assert store.size() == pytest.approx(exact, rel=0.1)


# ---- Where a ledger is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *("redis://", "redis:///0", "redis:host", "redis://host:port/0", "redis://host/ledger"),
        *("redis://host/0/1", "redis://host/0#1", "redis://:pass/word@host/0", "http://host/0"),
        *("redis://host/0?socket_timeout=soon", "redis://host/0?colour=blue", "redis://[::1/0"),
    ],
)
def test_wrong_url(url: str) -> None:
    """A wrong URL is one line that says what to type, and shows no password."""
    with pytest.raises(ConfigError, match=r'^ledger: .*write "redis://[^\n]*$') as raised:
        open_redis(url)
    assert "word" not in str(raised.value).replace("password", "")


@pytest.mark.parametrize("setting", ["protocol=3", "encoding=latin1", "cache=1", "retry=3"])
def test_settings_of_the_stores_own(redis_url: str, setting: str) -> None:
    """What a URL says for other clients of Redis does not change what the store reads."""
    with closing(open_ledger(f"{redis_url}?{setting}")) as ledger:
        key = Key("€", "1")
        granted(ledger.claim(key, sent_at=time.time()))
        assert isinstance(ledger.claim(key, sent_at=time.time()), Busy)
        ledger.keep_retention("€", "1h")
        assert ledger.retentions() == {"€": timedelta(hours=1)}
        assert [record.key for record in ledger.scan()] == [key]
        assert len(ledger.problems()) == 1


def test_wrong_password(private_redis: Redis) -> None:
    """A wrong password is refused at once, and never shown."""
    with Client.from_url(private_redis.url) as client:
        client.config_set("requirepass", "right-secret")
    url = private_redis.url.replace("//", "//:wrong-secret@")
    for call in (lambda: open_redis(url), Ledger(RedisStore(url)).counts):
        with pytest.raises((ConfigError, StoreError)) as raised:
            call()
        assert "secret" not in str(raised.value)
    assert open_redis(private_redis.url.replace("//", "//:right-secret@")).tallies() == {}


def test_wrong_database_or_prefix(redis_url: str) -> None:
    """A database that the server does not have is refused, and a prefix with a colon, which could
    be taken for another's keys.
    """
    with pytest.raises(ConfigError, match="prefix 'a:7' may only hold"):
        open_redis(redis_url, "a:7")
    with pytest.raises(ConfigError, match="out of range"):
        open_redis(urlsplit(redis_url)._replace(path="/99").geturl())


def test_user_with_few_rights(private_redis: Redis, key: Key) -> None:
    """The rights that the documentation names are enough."""
    rights = ["~processed_messages:*", "+@all", "-@dangerous", "+info"]
    with Client.from_url(private_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">secret", *rights)
        ledger = Ledger(open_redis(private_redis.url.replace("//", "//worker:secret@")))
        ledger.complete(granted(ledger.claim(key)))
        assert len(list(ledger.scan())) == 1
        assert ledger.size()
        assert "appendfsync unknown" in ledger.problems()[0]
        client.execute_command("ACL", "SETUSER", "worker", "+config|get")
        assert "appendfsync everysec" in ledger.problems()[0]
    assert ledger.purge("1ms") == 1


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_server_that_forgets(private_redis: Redis, policy: str, key: Key) -> None:
    """A server that drops keys when memory is full is refused, with what to type."""
    fit = open_redis(private_redis.url)
    with Client.from_url(private_redis.url) as client:
        client.config_set("maxmemory-policy", policy)
    with pytest.raises(ConfigError, match=f"policy {policy}.*CONFIG SET maxmemory-policy noevic"):
        open_redis(private_redis.url)
    with pytest.raises(ConfigError, match="maxmemory-policy"):
        Ledger(RedisStore(private_redis.url)).claim(key)
    assert any(policy in problem for problem in fit.problems())


def test_server_without_a_log(private_redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    """A server without AOF is warned of in the log, once for each opening, and is a problem."""
    open_redis(private_redis.url)
    assert events_in(caplog) == []
    with Client.from_url(private_redis.url) as client:
        client.config_set("appendonly", "no")
    store = open_redis(private_redis.url)
    store.tallies()
    assert events_in(caplog) == ["redis_aof_disabled"]
    [problem] = store.problems()
    assert "CONFIG SET appendonly yes" in problem


def test_server_that_flushes_late(private_redis: Redis) -> None:
    """With appendfsync other than always, problems tells what a power cut loses."""
    store = open_redis(private_redis.url)
    [problem] = store.problems()
    assert "appendfsync everysec" in problem
    with Client.from_url(private_redis.url) as client:
        client.config_set("appendfsync", "always")
        assert store.problems() == []
        client.execute_command("ACL", "SETUSER", "default", "-config")
        [problem] = store.problems()
        assert "appendfsync unknown" in problem


def test_clusters_and_replicas() -> None:
    """A cluster is refused: a script's keys would live on several of its servers. Replicas are
    named as a problem: a failover loses what they have not got.
    """
    assert redis_server.refusal(_FIT) is None
    assert "cluster" in str(redis_server.refusal({**_FIT, "redis_mode": "cluster"}))
    assert redis_server.problems({**_FIT, "connected_slaves": "0"}, "always") == []
    [problem] = redis_server.problems({**_FIT, "connected_slaves": "2"}, "always")
    assert "replicas (2)" in problem


def _new(message_id: str, consumer: str = "billing", **fields: Any) -> Record:
    record = Record(Key(consumer, message_id), State.PROCESSING, 1, 1, 0.0, 0.0, 60.0, version=5)
    return record._replace(**fields)


def _all_records(store: RedisStore) -> list[Record]:
    keys = [Key(consumer, str(n)) for consumer in ("billing", "mailing") for n in range(12)]
    return list(store.load(keys).records.values())


def _write_at_random(store: RedisStore, draw: random.Random) -> None:
    """Insert, change, remove or purge some of what `_all_records` looks at."""
    consumer, ids = draw.choice(("billing", "mailing")), draw.sample(range(12), 5)
    stored = draw.sample(records := _all_records(store), min(5, len(records)))
    fields: dict[str, Any] = {
        "state": draw.choice(list(State)),
        "duplicates": draw.choice((0, 3)),
        "lease_until": draw.choice((None, 0.0, 60.0)),
    }
    match draw.choice(("insert", "swap", "swap", "remove", "purge")):
        case "insert":
            insert(store, [_new(str(n), consumer, **fields) for n in ids])
        case "swap":
            news = [old._replace(**fields, version=old.version + 1) for old in stored]
            swap(store, [Swap(*pair) for pair in zip(stored, news, strict=True)])
        case "remove":
            swap(store, [Swap(old, None) for old in stored])
        case "purge":
            store.purge(Query(limit=2), [draw.choice(list(State))])


def _tallied(records: list[Record], now: float) -> dict[tuple[str, State], tuple[int, int, int]]:
    count: Counter[tuple[str, State]] = Counter()
    duplicates: Counter[tuple[str, State]] = Counter()
    over: Counter[tuple[str, State]] = Counter()
    for record in records:
        group = (record.key.consumer, record.state)
        count[group] += 1
        duplicates[group] += record.duplicates
        over[group] += record.lease_until is not None and record.lease_until <= now
    return {group: (count[group], duplicates[group], over[group]) for group in count}
