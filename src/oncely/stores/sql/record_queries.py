"""Reading many records: windows, pages and ranges of them, what they add up to, and purging.

A call without a docstring is the one by its name of the Store protocol.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    true,
)
from sqlalchemy.sql.expression import ColumnCollection

from oncely.core.record import Key, Record, State
from oncely.stores.sql.dialect import Dialect, OwnTables, Sample
from oncely.stores.sql.record_rows import record_of
from oncely.stores.sql.row_values import read
from oncely.stores.store import KeyRange, Look, Query, Tally, Wanted, Window

_PAGE = 1_000
"""Records that are read, and in memory, at a time."""
NOT_COMPLETED: ColumnElement[bool] = literal_column(f"status <> '{State.COMPLETED.value}'")
"""As the index of such records has it, so that it is used."""
_TALLIED = ("provider", "status", "last_processed_at")
_SAMPLES = 16
"""Keys that are sampled for each range: then one range is seldom twice as large as another."""
_FEW = 10_000
"""Up to so many records that are not completed are looked at at once, in their own index."""
SAMPLE = 4_000
"""Rows that estimates look at: a share of them is off by 1.6 % of all rows, seldom by more."""
_SAMPLED = ("provider", "status", "duplicates")
_STATES = {state.value for state in State}
_NONE = Tally(0, 0, 0.0, 0, is_estimate=True)
_Columns = ColumnCollection[str, Any]


def scan(at: OwnTables, query: Query) -> Sequence[Record]:
    c = at.dialect.table.c
    chosen = _records(at.dialect).where(fitting(at.dialect, query, at.dialect.time(at.link)))
    return _read(at, chosen.order_by(c.last_processed_at, c.id).limit(query.limit))


def claimed_by(at: OwnTables, workers: Collection[int]) -> Sequence[Record]:
    return _read(at, _records(at.dialect).where(*_live_claims(at, workers))) if workers else []


def claims_of(at: OwnTables, workers: Collection[int]) -> Mapping[int, int]:
    if not workers:
        return {}
    worker = at.dialect.table.c.worker
    counted = select(worker, func.count()).where(*_live_claims(at, workers)).group_by(worker)
    return dict(map(tuple, at.dialect.selected(at.link, counted)))


def _live_claims(at: OwnTables, workers: Collection[int]) -> Sequence[ColumnElement[bool]]:
    lease_until, now = at.dialect.epoch("lease_until"), at.dialect.time(at.link)
    is_live = or_(at.dialect.table.c.lease_until.is_(None), lease_until > now)
    claimed = _in_states(at.dialect, [State.PROCESSING])
    return [*claimed, at.dialect.table.c.worker.in_(workers), is_live]


def of_message(at: OwnTables, message_id: str) -> Sequence[Record]:
    c = at.dialect.table.c
    chosen = _records(at.dialect).where(c.message_id == message_id)
    return _read(at, chosen.order_by(c.provider))


def window(at: OwnTables, look: Look) -> Window:
    states = {query.state for query in look.fits}
    c, now = at.dialect.table.c, at.dialect.time(at.link)
    # Whether a record fits is not a condition: the database would go on reading until enough fit.
    fits = or_(*(fitting(at.dialect, query, now) for query in look.fits))
    is_fitting = and_(is_known(at.dialect), fits).label("fits")
    chosen = select(c.message_id, c.provider, is_fitting)
    if at.dialect.samples and not states & {None, State.COMPLETED}:
        values = sorted(state.value for state in states if state is not None)
        unfinished = (NOT_COMPLETED, c.status.in_(values))
        few = select(literal(1)).select_from(at.dialect.table).where(*unfinished).limit(_FEW + 1)
        counted = select(func.count()).select_from(few.subquery())
        [[count]] = at.dialect.selected(at.link, counted)
        if count <= _FEW:
            # The range of ids is left to the query around this one: for the range, the database
            # would take the index of the keys, and read what is completed. The limit keeps the two
            # apart; a few more may be there since they were counted.
            some = chosen.where(*unfinished).limit(2 * _FEW).subquery()
            fitting_ones = select(some).where(some.c.fits)
            return _first(at, look, fitting_ones, some.c, look.limit)._replace(looked_at=count)
    return _first(at, look, chosen, c, look.size)


def _first(at: OwnTables, look: Look, chosen: Select[Any], c: _Columns, size: int) -> Window:
    """Of about the first `size` rows of `chosen` after the end of the window before."""
    chosen = chosen.order_by(c.message_id, c.provider)
    # No upper bound: if PostgreSQL guessed that few rows are below it, it would read all of them
    # and sort them. One lower bound: with two, SQLite would begin to read at the first of them.
    # Databases compare ids by the code points of their characters, as Python does.
    is_later = c.message_id >= look.begins
    if look.after is not None and look.after >= look.begins:
        is_later = c.message_id > look.after
    rows = _ids_of(at, chosen.where(is_later).limit(size + 1))
    within = [row for row in rows if row[0].startswith(look.begins)]
    is_last = len(within) <= size
    if not is_last:
        # The row that is one too many shows whether all records of the last id are here. If not,
        # they are left to the next window, unless there is no other id.
        last = rows[-1][0]
        before = [row for row in rows if row[0] != last]
        within = before or _ids_of(at, chosen.where(c.message_id == last))
    return Window.of(within, look.limit, is_last=is_last)


def _ids_of(at: OwnTables, chosen: Select[Any]) -> list[tuple[str, str, bool]]:
    # In SQLite an id may be bytes, which come after all text: no page could name that record.
    rows = at.dialect.selected(at.link, chosen)
    return [(id_, consumer, fits) for id_, consumer, fits in rows if isinstance(id_, str)]


def key_ranges(at: OwnTables, number: int) -> Sequence[KeyRange]:
    """Ranges as the Store protocol says, from a sample of the keys."""
    sample = at.dialect.sample_ids(at.link, number * _SAMPLES)
    parts = max(1, min(number, len(sample)))
    cuts = [sample[len(sample) * part // parts] for part in range(1, parts)]
    return [KeyRange(after, until) for after, until in pairwise([None, *cuts, None])]


def page(at: OwnTables, condition: ColumnElement[bool], last: Key | None) -> Sequence[Record]:
    """The first records that fit after `last`, in the order of the keys' index."""
    c = at.dialect.table.c
    chosen = _records(at.dialect).where(condition).order_by(c.message_id, c.provider).limit(_PAGE)
    if last is not None:
        # The first condition follows from the second, but MariaDB needs it to use the index.
        chosen = chosen.where(
            c.message_id >= last.message_id,
            or_(c.message_id > last.message_id, c.provider > last.consumer),
        )
    return _read(at, chosen)


def tallies(at: OwnTables, unfinished: int | None = None) -> Mapping[tuple[str, State], Tally]:
    """As the Store protocol says; of so many at most that are not completed, where that is set."""
    c = at.dialect.table.c
    chosen = select(
        c.provider,
        c.status,
        c.duplicates,
        _waits_for_sender(at.dialect).label("for_sender"),
        at.dialect.epoch("lease_until").label("lease_until"),
        at.dialect.epoch("last_processed_at").label("last_seen"),
    )
    chosen = chosen.where(is_known(at.dialect))
    if unfinished is not None:
        chosen = chosen.where(NOT_COMPLETED).limit(unfinished)
    r = chosen.subquery().c
    now = at.dialect.time(at.link)
    over_at = case((r.lease_until <= now, r.lease_until))
    for_sender_at = case((r.for_sender, r.last_seen))
    totals = (
        *(func.min(r.last_seen), func.count(), func.count(over_at), func.sum(r.duplicates)),
        *(func.count(for_sender_at), func.min(over_at), func.min(for_sender_at)),
    )
    chosen = select(r.provider, r.status, *totals).group_by(r.provider, r.status)
    tallies = {}
    for row in at.dialect.selected(at.link, chosen):
        consumer, state, oldest = read(at.dialect.table, _TALLIED, row).values()
        count, over, duplicates, for_sender, *since = row[len(_TALLIED) :]
        since = [None if at is None else float(at) for at in since]
        tallies[consumer, state] = Tally(count, over, oldest, int(duplicates), for_sender, *since)
    return tallies


def estimates(at: OwnTables, most: int) -> Mapping[tuple[str, State], Tally]:
    """As the Store protocol says: of what is completed, which is nearly all of a large table, what
    a sample says; of the rest what the index of it says, unless that is over `most` as well.
    """
    if not at.dialect.samples:
        return tallies(at)
    some = select(literal(1)).select_from(at.dialect.table).limit(most + 1).subquery()
    [[count]] = at.dialect.selected(at.link, select(func.count()).select_from(some))
    if count <= most:
        return tallies(at)
    sample = at.dialect.sample(at.link, SAMPLE)
    # The sample may hold no record of a consumer.
    known: Any = at.run(f"SELECT provider FROM {at.dialect.consumers_name}").fetchall()
    found = {
        **{(consumer, State.COMPLETED): _NONE for [consumer] in known},
        **_estimated(at, sample),
    }
    rest = tallies(at, unfinished=most + 1)
    is_whole = sum(tally.count for tally in rest.values()) <= most
    for key, tally in rest.items():
        estimated = found.get(key, _NONE)
        found[key] = tally
        if not is_whole:
            # Only some of the rows were read.
            found[key] = replace(
                tally,
                count=max(tally.count, estimated.count),
                duplicates=max(tally.duplicates, estimated.duplicates),
                is_estimate=True,
            )
    return {
        (consumer, state): tally
        for (consumer, state), tally in found.items()
        # Who is in the sample may have been completed before the index was read.
        if state is State.COMPLETED or not is_whole or (consumer, state) in rest
    }


def _estimated(at: OwnTables, sample: Sample) -> dict[tuple[str, State], Tally]:
    rows: Counter[tuple[str, State]] = Counter()
    duplicates: Counter[tuple[str, State]] = Counter()
    for row in sample.rows:
        if row[1] in _STATES:
            consumer, state, repeated = read(at.dialect.table, _SAMPLED, row).values()
            rows[consumer, state] += 1
            duplicates[consumer, state] += repeated
    share = sample.total / max(1, len(sample.rows))
    return {
        key: Tally(round(count * share), 0, 0.0, round(duplicates[key] * share), is_estimate=True)
        for key, count in rows.items()
    }


def purge(at: OwnTables, query: Query, states: Sequence[State], after: str) -> tuple[int, str]:
    """One batch of `Store.purge`, from the place `after` on; as `Dialect.purge` returns."""
    # To look for waiting messages and steps of each record costs as much as the rest of the purge.
    # Rows that come into these tables from now on are not of records that are old enough.
    tables = (at.dialect.waiting_name, at.dialect.steps_name)
    asked = ", ".join(f"EXISTS (SELECT 1 FROM {name})" for name in tables)
    some_wait, some_steps = at.run(f"SELECT {asked}").fetchone()
    now = at.dialect.time(at.link)
    record, of_record = at.dialect.table.c, at.dialect.waiting_table.c
    condition = and_(
        record.status.in_([state.value for state in states]), fitting(at.dialect, query, now)
    )
    if some_wait:
        waits = exists().where(
            of_record.message_id == record.message_id, of_record.provider == record.provider
        )
        condition = and_(condition, ~waits)
    horizon = now - (query.older_than_s or 0.0)
    steps = bool(some_steps)
    return at.dialect.purge(at.link, condition, query.limit, horizon, steps=steps, after=after)


def fitting(dialect: Dialect, query: Query, now: float) -> ColumnElement[bool]:
    """The records that fit a query, by the time `now`."""
    c = dialect.table.c
    conditions: list[ColumnElement[bool]] = [true()]
    if query.consumer is not None:
        conditions.append(c.provider == query.consumer)
    if query.state is not None:
        conditions += _in_states(dialect, [query.state])
    if query.text is not None:
        # Compared character by character.
        position = getattr(func, dialect.position)(c.message_id, bindparam(None, query.text))
        conditions.append(position > 0)
    if query.lease_over:
        conditions.append(dialect.epoch("lease_until") <= now)
    if query.exhausted:
        conditions.append(c.exhausted.is_(True))
    if query.waits_for_sender:
        conditions.append(_waits_for_sender(dialect))
    if query.older_than_s is not None:
        conditions.append(dialect.epoch("last_processed_at") < now - query.older_than_s)
    return and_(*conditions)


def _waits_for_sender(dialect: Dialect) -> ColumnElement[bool]:
    """As Record says."""
    c = dialect.table.c
    is_allowed = and_(c.status == State.FAILED.value, c.attempts == 0, c.exhausted.is_(False))
    return and_(is_allowed, c.lease_until.is_(None))


def wanted_of(dialect: Dialect, keys: KeyRange, wanted: Wanted) -> ColumnElement[bool]:
    """The records of a range that are wanted."""
    c = dialect.table.c
    conditions: list[ColumnElement[bool]] = [true()]
    if keys.after is not None:
        conditions.append(c.message_id > keys.after)
    if keys.until is not None:
        conditions.append(c.message_id <= keys.until)
    if wanted.consumers is not None:
        conditions.append(c.provider.in_(wanted.consumers))
    if wanted.states is not None:
        conditions += _in_states(dialect, wanted.states)
    if wanted.seen_from is not None:
        conditions.append(dialect.epoch("last_processed_at") >= wanted.seen_from)
    if wanted.seen_before is not None:
        conditions.append(dialect.epoch("last_processed_at") < wanted.seen_before)
    return and_(*conditions)


def _in_states(dialect: Dialect, states: Collection[State]) -> Sequence[ColumnElement[bool]]:
    found = dialect.table.c.status.in_([state.value for state in states])
    return [found] if State.COMPLETED in states else [found, NOT_COMPLETED]


def is_known(dialect: Dialect) -> ColumnElement[bool]:
    """Rows with a status that we do not know are somebody else's."""
    return dialect.table.c.status.in_([state.value for state in State])


def _records(dialect: Dialect) -> Select[Any]:
    return select(*dialect.loaded()).select_from(dialect.table).where(is_known(dialect))


def _read(at: OwnTables, chosen: Select[Any]) -> Sequence[Record]:
    table = at.dialect.table
    return [record_of(table, row) for row in at.dialect.selected(at.link, chosen)]
