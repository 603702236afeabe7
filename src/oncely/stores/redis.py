"""Records in Redis: a hash for each, and sorted sets that find the least recently seen ones.

Atomic work is done by the scripts in `redis_lua`; their prelude lists the keys. Each script takes
and returns one JSON text: to parse a reply of many parts would cost more than everything else.
"""

import heapq
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar
from urllib.parse import urlsplit

from oncely._util.clock import moved_time
from oncely._util.event_log import EventLog
from oncely.core.cases import Case, Row
from oncely.core.errors import ConfigError, ReplyLost, StoreDenied, StoreError, StoreUnavailable
from oncely.core.record import Key, Record, State
from oncely.stores import redis_server
from oncely.stores.names import TABLE_NAME, Program, in_words
from oncely.stores.redis_server import READS, WRITES, RedisServer, Script
from oncely.stores.retrying import TryAgain
from oncely.stores.store import (
    Believed,
    CallersTransaction,
    Clock,
    Horizons,
    KeyRange,
    Loaded,
    Look,
    Query,
    Store,
    Tally,
    Transaction,
    Wanted,
    Window,
    never_joined,
)

_BATCH = 1_000
"""Records for one call of a script: the call blocks the server, and Lua limits its arguments."""

_PAGE = 100

_INSERT = Script("prelude", "write", "batch", "horizons", "insert")
_UPDATE = Script("prelude", "write", "batch", "update")
_DELETE = Script("prelude", "write", "batch", "delete")
_LOAD = Script("prelude", "read", "load")
_SCAN = Script("prelude", "read", "choose", "scan")
_PURGE = Script("prelude", "write", "horizons", "choose", "purge")
_FORGET_UNTIL = Script("prelude", "horizons", "forget_until")
_TALLIES = Script("prelude", "tallies")
_SIZE = Script("prelude", "size")
_LACKING = Script("lacking")

T = TypeVar("T")

_log = EventLog(__name__)


def open_redis(url: str, prefix: str = TABLE_NAME) -> "RedisStore":
    """The store in the Redis at `url`, with keys that begin with `prefix`.

    Raises ConfigError for a wrong URL and for a server that would lose records. If the server
    cannot be reached now, the first call that reaches it raises that.
    """
    store = RedisStore(url, prefix)
    try:
        store.check()
    except StoreUnavailable:
        pass
    except StoreError as error:
        raise ConfigError(f"ledger: {error}") from error
    return store


class RedisStore(Store):
    """All records of one ledger in one Redis.

    `clock` replaces the server's clock; only tests want that.
    """

    def __init__(self, url: str, prefix: str = TABLE_NAME, clock: Clock | None = None) -> None:
        if not re.fullmatch(r"[\w.-]+", prefix):
            raise ConfigError(f"ledger: the prefix {prefix!r} may only hold letters, digits, _ . -")
        example = 'write "redis://localhost:6379/0" or "rediss://user:password@host:6379/0"'
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("redis", "rediss") and parts.hostname is not None
            if not is_one or not re.fullmatch(r"(/\d*)?", parts.path) or parts.fragment:
                raise ValueError
            self._server = RedisServer(url)
        except TypeError as error:
            setting = str(error).rpartition(" ")[2]
            raise ConfigError(f"ledger: a Redis URL has no setting {setting}; {example}") from None
        except ValueError:
            # A URL that cannot be parsed is not shown: its password cannot be found to be masked.
            raise ConfigError(
                "ledger: this is not the URL of a Redis with the number of a database; " + example
            ) from None
        self._prefix = prefix
        self._clock = clock
        self._is_checked = False

    def insert(self, case: Case, believed: Mapping[str, float | None] | None = None) -> set[Key]:
        pairs = [
            [consumer, False if at is None else at] for consumer, at in (believed or {}).items()
        ]
        return self._write(_INSERT, case.rows, case, horizons=pairs)

    def horizons(self, consumers: Collection[str]) -> Horizons:
        found = self._all_of("horizons")
        return {consumer: found[consumer] for consumer in consumers if consumer in found}

    def forget_until(self, horizons: Horizons) -> None:
        # Raising them twice does no harm.
        self._run(_FORGET_UNTIL, list(horizons.items()))

    def keep_retention(self, consumer: str, retention_s: float) -> None:
        self._server.ask("HSET", f"{self._prefix}:retentions", consumer, repr(retention_s))

    def retentions(self) -> Mapping[str, float]:
        return self._all_of("retentions")

    def _all_of(self, name: str) -> Mapping[str, float]:
        """A hash that has a number for each consumer."""
        found = self._server.ask("HGETALL", f"{self._prefix}:{name}")
        return {
            consumer: float(text) for consumer, text in zip(found[::2], found[1::2], strict=True)
        }

    def load(self, keys: Collection[Key]) -> Loaded:
        wanted = list(keys)
        found: dict[Key, Record] = {}
        times = []
        for start in range(0, len(wanted) or 1, _BATCH):
            batch = wanted[start : start + _BATCH]
            time, rows = json.loads(self._run(_LOAD, batch))
            times.append(float(time))
            # Where the first value, the status, is false, there is no record.
            pairs = zip(batch, rows, strict=True)
            found.update((key, _record(key, row)) for key, row in pairs if row[0])
        # The first time: a lease that is over by then was over when its record was read.
        return Loaded(found, times[0])

    def update(self, case: Case) -> set[Key]:
        return self._write(_UPDATE, case.rows, case)

    def delete(self, rows: Sequence[Believed]) -> set[Key]:
        return self._write(_DELETE, rows)

    has_transactions = False

    def transaction(self, work: Callable[[Transaction], T]) -> T:  # noqa: ARG002 - the protocol's.
        raise ConfigError(
            "ledger: Redis has no transactions, so no message waits, and no step is kept; open the "
            'ledger on a database, as in "postgresql://user@host/database"'
        )

    def within(self, connection: Any) -> AbstractContextManager[CallersTransaction]:  # noqa: ARG002
        raise never_joined("in Redis")

    def check_joins(self, source: object) -> None:  # noqa: ARG002
        raise never_joined("in Redis")

    def wait_for_messages(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def scan(self, query: Query) -> Sequence[Record]:
        streams = [self._fitting(group, query) for group in self._groups(query, list(State))]
        return list(islice(heapq.merge(*streams, key=attrgetter("last_seen")), query.limit))

    def of_message(self, message_id: str) -> Sequence[Record]:
        consumers = sorted({consumer for consumer, _ in self.tallies()})
        found = self.load([Key(consumer, message_id) for consumer in consumers]).records
        return sorted(found.values(), key=attrgetter("key"))

    def window(self, look: Look) -> Window:
        """As the Store protocol says, in an order of its own: consumer by consumer and state by
        state, the least recently seen first. A record that changes between two windows may be given
        twice, or not at all.
        """
        begin: _Group | None = None
        after: object = None
        if look.after is not None:
            try:
                consumer, in_state, *rest_of_end = map(str, json.loads(look.after))
                begin, after = (consumer, State(in_state)), rest_of_end or None
            except (ValueError, TypeError):
                raise ConfigError(
                    f"after: {look.after!r} is not where a search has ended; a ledger in Redis has "
                    "no order of ids: write what the search before gave as its end"
                ) from None
        groups = sorted(
            (group, number)
            for number, query in enumerate(look.fits)
            for group in self._groups(query, list(State))
            if begin is None or group >= begin
        )
        if not groups:
            return Window([], 0, None)
        (group, number), rest = groups[0], groups[1:]
        asked = _asked(group, look.fits[number], look.limit, after if group == begin else None)
        position, rows, looked_at = json.loads(self._run(_SCAN, {**asked, "begins": look.begins}))
        end = [*group, *position] if position else next(([*later] for later, _ in rest), None)
        keys = [Key(group[0], message_id) for message_id, _ in rows]
        return Window(keys, looked_at, None if end is None else json.dumps(end))

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        for consumer in [None] if wanted.consumers is None else wanted.consumers:
            for page in self._all_keys(consumer):
                records = self.load(page).records.values()
                yield [
                    record
                    for record in records
                    if keys.holds(record.key.message_id) and wanted.holds(record)
                ]

    def tallies(
        self,
        most: int | None = None,  # noqa: ARG002 - all are read.
    ) -> Mapping[tuple[str, State], Tally]:
        tallies = {}
        for group, count, over, *others in json.loads(self._run(_TALLIES, [])):
            state, _, consumer = group.partition(":")
            oldest, duplicates, allowed, *since = others
            over_at, sender_at = (float(at) if at else None for at in since)
            tally = Tally(count, over, float(oldest), int(duplicates), allowed, over_at, sender_at)
            tallies[consumer, State(state)] = tally
        return tallies

    def purge(self, query: Query, states: Sequence[State]) -> int:
        left = query.limit
        for group in self._groups(query, states):
            after = None
            while left:
                asked = _asked(group, query, min(left, _BATCH), after)
                after, count = json.loads(self._run(_PURGE, asked))
                left -= count
                if not after:
                    break
        return query.limit - left

    def migrate(self) -> None:
        pass

    def grants(self, program: Program) -> Sequence[str]:
        commands = f"{READS} {'' if program == 'reader' else WRITES}"
        lacking = self._server.run(_LACKING, self._prefix, commands, lost=TryAgain)
        return [f"ACL SETUSER {self._server.user} ~{self._prefix}:* {lacking}"] if lacking else []

    def problems(self, program: Program = "worker") -> Sequence[str]:
        try:
            found = self._server.ask("CONFIG", "GET", "appendfsync")
        except StoreUnavailable:
            raise
        except StoreError:  # A hosted Redis may not let its users ask.
            found = []
        lacks = f"The user of this ledger lacks what {in_words(program)} needs; type:"
        unsafe = redis_server.problems(self._server.info(), found[1] if found else None)
        return [*(f"{lacks} {grant}" for grant in self.grants(program)), *unsafe]

    def size(self) -> int | None:
        return int(self._run(_SIZE, []))

    def close(self) -> None:
        self._server.close()

    def check(self) -> None:
        """Raise ConfigError where the server would lose records. The first call checks it, too."""
        info = self._server.info()
        why = redis_server.refusal(info)
        if why is not None:
            raise ConfigError(f"ledger: {self._server.name}: {why}")
        if not redis_server.has_aof(info):
            _log.warning(
                "%(store)s has no append-only file: records are lost when it restarts; type "
                "CONFIG SET appendonly yes",
                extra={"event": "redis_aof_disabled", "store": self._server.name},
            )
        self._is_checked = True

    def _write(
        self, script: Script, rows: Sequence[Row], case: Case | None = None, **more: object
    ) -> set[Key]:
        """The keys of the rows that the script has written, batch by batch; `more` is the same for
        all batches.
        """
        digits = ""
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            asked = {
                "ids": [row[0].message_id for row in batch],
                **_column("consumer", [row[0].consumer for row in batch]),
                **_column("believed", [str(row[1]) for row in batch]),
                **more,
            }
            if case is not None:
                asked |= _column("version", [str(row[2]) for row in batch])
                fields = case.change.fields
                changes: Sequence[Mapping[str, object]] = [_change(fields)] * len(batch)
                if case.own:
                    own = (zip(case.own, row[3:], strict=True) for row in batch)
                    changes = [_change({**fields, **dict(each)}) for each in own]
                asked |= _column("change", changes)
            digits += self._run(script, asked, lost=ReplyLost)
        return {row[0] for row, digit in zip(rows, digits, strict=True) if digit == "1"}

    def _run(self, script: Script, asked: object, lost: type[Exception] = TryAgain) -> Any:
        if not self._is_checked:
            self.check()
        now = moved_time() if self._clock is None else self._clock()
        clock = "" if now is None else str(now)
        try:
            return self._server.run(script, self._prefix, clock, json.dumps(asked), lost=lost)
        except StoreDenied as error:
            # The error of a script does not say which command it is that the user may not run.
            grants = self.grants(
                "reader" if script in (_LOAD, _SCAN, _SIZE, _TALLIES) else "worker"
            )
            raise StoreDenied("; type: ".join((str(error), *grants))) from error

    def _all_keys(self, consumer: str | None) -> Iterator[Collection[Key]]:
        """The keys of all records, or of those of one consumer, page by page."""
        start = f"{self._prefix}:"
        # A key that does not begin with a number is not a record's.
        of_consumer = "[0-9]*:"
        if consumer is not None:
            # As a pattern that matches only this name.
            literally = re.sub(r"([\\*?\[\]^-])", r"\\\1", consumer)
            of_consumer = f"{len(consumer.encode())}:{literally}:"
        pattern = f"{start}{of_consumer}*"
        cursor = "0"
        while True:
            cursor, found = self._server.ask("SCAN", cursor, "MATCH", pattern, "COUNT", str(_BATCH))
            yield {_key(name.removeprefix(start)) for name in found}
            if cursor == "0":
                return

    def _groups(self, query: Query, states: Collection[State]) -> Sequence["_Group"]:
        """The groups in which records that fit may be."""
        return [
            (consumer, state)
            for consumer, state in self.tallies()
            if query.consumer in (None, consumer)
            and query.state in (None, state)
            and state in states
        ]

    def _fitting(self, group: "_Group", query: Query) -> Iterator[Record]:
        """The records of a group that fit, least recently seen first, page by page as needed."""
        after = None
        found = set()
        while True:
            asked = _asked(group, query, min(query.limit, _PAGE), after)
            after, rows, _ = json.loads(self._run(_SCAN, asked))
            for message_id, values in rows:
                # The scan may return a record twice, when the one that it continues after has
                # moved.
                if message_id not in found:
                    found.add(message_id)
                    yield _record(Key(group[0], message_id), values)
            if not after:
                return


_Group = tuple[str, State]


def _asked(group: _Group, query: Query, limit: int, after: object) -> Mapping[str, object]:
    consumer, state = group
    asked = {
        "consumer": consumer,
        "state": state,
        "older_than_s": query.older_than_s,
        "text": query.text,
        "lease_over": query.lease_over,
        "exhausted": query.exhausted,
        "waits_for_sender": query.waits_for_sender,
        "limit": limit,
        "after": after,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _key(name: str) -> Key:
    """The key of the record under a name as in redis_lua/prelude.lua, without the prefix."""
    length, _, rest = name.partition(":")
    text = rest.encode()
    return Key(text[: int(length)].decode(), text[int(length) + 1 :].decode())


def _column(name: str, values: Sequence[object]) -> Mapping[str, object]:
    """A column of a batch: one value for all, or one for each."""
    if values and values.count(values[0]) == len(values):
        return {name: values[0]}
    return {f"{name}s": values}


def _change(fields: Mapping[str, Any]) -> Mapping[str, object]:
    """A change as the scripts take it: what has its default is left out of a record."""
    given: list[str] = []
    cleared: list[str] = []
    asked: dict[str, object] = {"fields": given, "cleared": cleared}
    for name, value in fields.items():
        match name, value:
            case "state", _:
                asked["state"] = value
            case "duplicates", _:
                asked["count"] = value
            case "lease_s", _:
                asked["lease_s"] = False if value is None else value
            case "worker", _:
                pass  # Workers are not kept here.
            case "exhausted", True:
                given += (name, "1")
            case ("exhausted", _) | (_, None):
                cleared.append(name)
            case "metadata" | "result", _:
                given += (name, json.dumps(value))
            case _:
                given += (name, str(value))
    return asked


def _record(key: Key, values: Sequence[Any]) -> Record:
    status, attempts, fence, first_seen, last_seen, lease_until = values[:6]
    metadata, result, fingerprint, exhausted, duplicates, version = values[6:]
    return Record(
        key=key,
        state=State(status),
        attempts=int(attempts),
        fence=int(fence),
        first_seen=float(first_seen),
        last_seen=float(last_seen),
        lease_until=float(lease_until) if lease_until else None,
        metadata=json.loads(metadata) if metadata else None,
        result=json.loads(result) if result else None,
        fingerprint=None if fingerprint is False else fingerprint,
        exhausted=bool(exhausted),
        duplicates=int(duplicates),
        version=int(version),
    )
