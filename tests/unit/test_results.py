"""Results: what is kept of them, and given back to a duplicate as it was."""

import asyncio
import functools
import json
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import pytest
from pydantic import BaseModel, Field
from tests.logs import of_event
from tests.unit.conftest import Queue

from oncely import Consumer, Key, Ledger, Message, Policy, Work, claimed, current, once
from oncely.barrier import idempotent_consumer, message_context
from oncely.core.errors import ConfigError
from oncely.middleware import CallNext


class Color(Enum):
    """Of no type that JSON knows."""

    RED = "red"
    BLUE = (1, 2)


class Level(IntEnum):
    """A number for JSON."""

    LOW = 1


class Size(StrEnum):
    """A text for JSON, also as a key."""

    LARGE = "large"


class Line(NamedTuple):
    """A list for JSON."""

    article: str
    number: int


@dataclass(frozen=True)
class Receipt:
    """What a handler may return."""

    paid_on: date
    amount: Decimal
    lines: tuple[Line, ...] = ()
    color: Color | None = None
    parts: Mapping[str, "Receipt"] = field(default_factory=dict)


@dataclass
class Refusal:
    """Or instead."""

    reason: str


class Invoice(BaseModel):
    """A model whose names in JSON are others."""

    number: int = Field(alias="invoiceNumber")
    issued: datetime
    receipt: Receipt | None = None


DAY = date(2026, 11, 28)
NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)
RECEIPT = Receipt(
    DAY, Decimal("9.90"), (Line("tea", 2),), Color.RED, {"tip": Receipt(DAY, Decimal(1))}
)

WITHOUT_TYPES: list[Any] = [
    *(DAY, NOON, time(12, 30), timedelta(days=9, microseconds=1), Decimal("9.90"), UUID(int=7)),
    *(b"\0a", {"on": [DAY, {"at": NOON}], "by": None}, Level.LOW),
]
WITH_TYPES: list[tuple[Any, Any]] = [
    (Color, Color.RED),
    (Level, Level.LOW),
    (Receipt, RECEIPT),
    (Receipt | None, RECEIPT),
    (Refusal | Receipt, RECEIPT),
    (Refusal | str | Decimal, Decimal(7)),
    (list[Receipt], [RECEIPT, RECEIPT]),
    (Sequence[Receipt], [RECEIPT]),
    (dict[str, Receipt], {"a": RECEIPT}),
    (dict[Size, Receipt], {Size.LARGE: RECEIPT}),
    (dict[Size | str, Receipt], {Size.LARGE: RECEIPT, "small": RECEIPT}),
    (tuple[date, Receipt], (DAY, RECEIPT)),
    (Annotated[Receipt, "a note"], RECEIPT),
    (Line, Line("tea", 2)),
    (Invoice, Invoice(invoiceNumber=7, issued=NOON, receipt=RECEIPT)),
    (dict[str, Invoice], {"a": Invoice(invoiceNumber=7, issued=NOON)}),
    # Of another type than was annotated: as JSON.
    (Color | str, "red"),
    (Receipt, {"number": 7}),
]
CASES = [(None, value) for value in WITHOUT_TYPES] + WITH_TYPES
KEPT: list[tuple[Any, Any, Any]] = [
    (None, (1, (2,)), [1, [2]]),
    (dict[str, Any], {"a": (1, 2)}, {"a": [1, 2]}),
]

UNKEPT: Mapping[str, tuple[Any, Any]] = {
    "object": (None, object()),
    "set": (None, {1, 2}),
    "dataclass": (None, RECEIPT),
    "inner": (dict[str, Any], {"a": Color.RED}),
    # JSON has text alone as keys.
    "keys": (None, {1: "a", "1": "b"}),
    "inner keys": (None, {"a": [({None: 1},)]}),
    "keys of another type": (Receipt, {1: "a"}),
    # They would be read as values of those types.
    "like a date": (None, {"on": {"oncely:date": "2026-11-28"}}),
    "like another type": (None, {"oncely:as_is": 1}),
}


def returning(value: Any, hint: Any) -> Callable[..., Any]:
    """A function that returns it, with that annotation, if there is one."""

    def function(*_: Any) -> Any:
        return value

    function.__annotations__ = {} if hint is None else {"return": hint}
    return function


def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, async."""

    async def coroutine(*args: Any) -> Any:
        return function(*args)

    coroutine.__annotations__ = function.__annotations__
    return coroutine


# ---- Every face, twice: what a duplicate gets --------------------------------------------------


def by_once(ledger: Ledger, function: Callable[..., Any]) -> Any:
    """A function that is not async."""
    charge = once(ledger, consumer="billing", key=str, keep_result=True)(function)
    charge("a")
    return charge("a")


def by_async_once(ledger: Ledger, function: Callable[..., Any]) -> Any:
    """An async one."""
    charge = once(ledger, consumer="billing", key=str, keep_result=True)(awaited(function))
    asyncio.run(charge("a"))
    return asyncio.run(charge("a"))


def by_barrier(ledger: Ledger, function: Callable[..., Any]) -> Any:
    """Behind a barrier."""
    behind = idempotent_consumer(ledger, keep_result=True)(function)
    with message_context("a", "billing"):
        behind()
        return behind()


def by_consumer(ledger: Ledger, function: Callable[..., Any]) -> Any:
    """In a consumer, whose outer middleware gets the results."""
    queue, results = Queue(), []

    def note(message: Message, call_next: CallNext) -> Any:
        results.append(call_next(message))

    queue.put("a", "a")
    consumer = Consumer(queue, "in").middleware(note)
    consumer.idempotent(ledger, "billing", policy=Policy(results="keep"))
    consumer.consume(function, drain=True)
    return results[1]


def by_step(ledger: Ledger, function: Callable[..., Any]) -> Any:
    """A step that a retry passes over."""
    results = []

    @once(ledger, consumer="billing", key=str)
    def charge(_: str) -> None:
        results.append(current().step("debit", function))
        if len(results) == 1:
            raise OSError("the log cannot be written")

    with pytest.raises(OSError, match="the log"):
        charge("a")
    charge("a")
    return results[1]


FACES = [by_once, by_async_once, by_barrier, by_consumer, by_step]
Face = Callable[[Ledger, Callable[..., Any]], Any]


@pytest.mark.parametrize("face", FACES)
def test_given_back_equal(ledger: Ledger, face: Face) -> None:
    """Every type comes back, and stands as JSON in the ledger."""
    for hint, value in CASES:
        back = face(ledger, returning(value, hint))
        assert (type(back), back) == (type(value) if hint else type(back), value)
        for record in ledger.scan():
            json.dumps(record.result)
            ledger.forget(record.key)


@pytest.mark.parametrize(("hint", "value", "back"), KEPT)
def test_given_back_as_json(ledger: Ledger, hint: Any, value: Any, back: Any) -> None:
    """Without a type a tuple is a list, as JSON has it."""
    assert by_once(ledger, returning(value, hint)) == back


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("hint", "value"),
    UNKEPT.values(),
    ids=UNKEPT,
)
def test_that_cannot_be_kept(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, face: Face, hint: Any, value: Any
) -> None:
    """The handler has succeeded, and does not run again: that is logged once, and a duplicate gets
    None.
    """
    runs = []

    def function(*_: Any) -> Any:
        runs.append(1)
        return value

    function.__annotations__ = {} if hint is None else {"return": hint}
    assert face(ledger, function) is None
    assert len(runs) == 1
    [logged] = of_event(caplog, "result_not_kept")
    assert "cannot be kept: TypeError: " in logged.getMessage()
    [record] = ledger.scan()
    assert (record.is_handled, record.result) == (True, None)


@pytest.mark.parametrize(
    "hint",
    [
        *(socket.socket, set[int], list[socket.socket], complex | None),
        *(dict[int, str], tuple[Mapping[Color, Receipt], ...]),
    ],
)
@pytest.mark.parametrize("face", FACES)
def test_types_that_cannot_be_kept(ledger: Ledger, face: Face, hint: Any) -> None:
    """They are refused before anything runs; where no result is kept they do not matter."""
    runs: list[int] = []

    def function(*_: Any) -> Any:
        runs.append(1)

    function.__annotations__ = {"return": hint}
    with pytest.raises(ConfigError, match=r"the result of .* cannot be kept as JSON: \w+ has no"):
        face(ledger, function)
    assert runs == []
    once(ledger, consumer="billing", key=str)(function)("b")
    assert runs == [1]


def test_types_that_were_changed(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """A result that a later version cannot read is logged, and None; nothing runs again."""
    decorate = once(ledger, consumer="billing", key=str, keep_result=True)
    decorate(returning(RECEIPT, Receipt))("a")
    assert decorate(returning(Refusal("no"), Refusal))("a") is None
    assert len(of_event(caplog, "result_unreadable")) == 1


@pytest.mark.parametrize("keep_result", [Receipt, json])
def test_chosen(ledger: Ledger, keep_result: Any) -> None:
    """Where no annotation names the type, it can be given; or what keeps results."""
    value = RECEIPT if keep_result is Receipt else {"a": 1}
    decorate = once(ledger, consumer="billing", key=str, keep_result=keep_result)
    charge = decorate(functools.partial(returning(value, None)))
    assert [charge("a"), charge("a")] == [value, value]
    for _ in range(2):
        work: Work = claimed(ledger, Key("mailing", "a"), keep_result=keep_result)
        with work:
            if work.is_new:
                work.result = value
    assert work.result == value


def test_serializer_that_fails(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it raises or returns, the function has succeeded, and the ledger has JSON alone."""
    for number, serializer in enumerate((pickle, json)):
        decorate = once(ledger, consumer="billing", key=str, keep_result=serializer)
        charge = decorate(returning(float("nan"), None))
        charge(number)
        assert charge(number) is None
    assert len(of_event(caplog, "result_not_kept")) == 2
