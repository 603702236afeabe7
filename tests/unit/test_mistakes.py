"""What users get wrong is answered by one clear line, where they wrote it."""

import asyncio
import enum
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from tests.logs import of_event
from tests.processes import printed
from tests.records import granted, record_of

from oncely.barrier import idempotent_consumer, message_context
from oncely.core.errors import ConfigError, InDoubtError, MessageError, MismatchError
from oncely.core.fingerprint import content_of
from oncely.core.message import Message, check_message
from oncely.core.policy import Policy, at_most_once
from oncely.core.record import Key, State
from oncely.ledger.async_ledger import AsyncLedger
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.lifecycle.work import claimed
from oncely.middleware import Idempotent
from oncely.once import once
from oncely.outbox import Relay
from oncely.repository import ProcessedMessageRepository
from oncely.service import IdempotenceService
from oncely.testing import ManualClock
from oncely.transports.open_transport import open_transport

Decorate = Callable[..., Any]
"""What all that takes a ledger is called with: ledger, and lease and policy by name."""


def _once(ledger: Any, consumer: Any = "billing", **options: Any) -> Any:
    return once(ledger, consumer=consumer, key=lambda message: message.id, **options)


def _claimed(ledger: Any, consumer: Any = "billing", **options: Any) -> Any:
    return claimed(ledger, Key(consumer, "1"), **options)


def _service(ledger: Any, consumer: Any = "billing", **options: Any) -> Any:
    return IdempotenceService(ledger, consumer, **options)


def _middleware(ledger: Any, consumer: Any = "billing", **options: Any) -> Any:
    return Idempotent(ledger, consumer, **options)


LEASED: list[Decorate] = [_once, _claimed, _service, idempotent_consumer]
NAMED: list[Decorate] = [_once, _claimed, _service, _middleware]

every = pytest.mark.parametrize("use", [*NAMED, idempotent_consumer])


@pytest.fixture
def guard(ledger: Ledger) -> Decorate:
    """`once` over a ledger in memory, with what a test adds."""

    def make(**options: Any) -> Any:
        return once(ledger, **{"consumer": "billing", "key": lambda *_, **__: "1", **options})

    return make


# ---- Ledger, consumer, policy, lease ---------------------------------------------------------


def _relay(ledger: Any) -> Any:
    return Relay(ledger, open_transport("memory://a"))


@pytest.mark.parametrize("use", [*NAMED, idempotent_consumer, ProcessedMessageRepository, _relay])
def test_ledger_that_is_none(ledger: Ledger, use: Decorate) -> None:
    """A URL, an AsyncLedger or anything else in the ledger's place is named, and never shown."""
    for wrong in ("postgresql://me:secret@db", AsyncLedger(ledger), None, object()):
        with pytest.raises(ConfigError, match=r"ledger: \w+ is not a Ledger; write open_ledger"):
            use(wrong)


@pytest.mark.parametrize("use", NAMED)
@pytest.mark.parametrize("consumer", ["", " ", None, 7, "a\0", "x" * 256])
def test_consumer_that_is_no_name(ledger: Ledger, use: Decorate, consumer: Any) -> None:
    """A consumer that no record can be kept under is refused before any message comes."""
    with pytest.raises(ConfigError, match=r"consumer.*; write consumer="):
        use(ledger, consumer)


@every
@pytest.mark.parametrize(
    ("policy", "instead"),
    [(at_most_once, r"write at_most_once\(\)"), (Policy, r"write Policy\(\)"), ("hold", "write")],
)
def test_policy_that_is_none(ledger: Ledger, use: Decorate, policy: Any, instead: str) -> None:
    """A preset that was not called is a policy's function, and no policy."""
    with pytest.raises(ConfigError, match=f"policy: .*{instead}"):
        use(ledger, policy=policy)


@pytest.mark.parametrize("use", LEASED)
@pytest.mark.parametrize("lease", [timedelta(0), "", "0s", 0])
def test_lease_of_nothing(ledger: Ledger, use: Decorate, lease: Any) -> None:
    """A lease of zero, in any form, is an error, and never stands for the policy's own."""
    with pytest.raises(ConfigError, match="lease"):
        use(ledger, lease=lease)


# ---- Decorating --------------------------------------------------------------------------------


def _work(message: Message) -> None: ...


@pytest.mark.parametrize("decorator", [once, idempotent_consumer])
def test_decorator_without_arguments(decorator: Any) -> None:
    """A bare decorator takes its function for the ledger: the error shows how it is written."""
    with pytest.raises(ConfigError, match=r"it takes arguments; write @\w+\(ledger"):
        decorator(_work)


async def _async_key(message: Message) -> str:
    return message.id


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"key": "id"}, "key: 'id' is not a function; write key=lambda"),
        ({"key": None}, "key: None is not a function"),
        ({"key": _async_key}, "key: _async_key is async; write it without async"),
        ({"fingerprint": "amount"}, "fingerprint: 'amount' is not a function; write fingerprint="),
        ({"fingerprint": None}, "fingerprint: None is not a function"),
        ({"fingerprint": _async_key}, "fingerprint: _async_key is async; write it without"),
    ],
)
def test_key_and_fingerprint(guard: Decorate, options: dict[str, Any], line: str) -> None:
    """What is to be called, and cannot be, is refused where it is written."""
    with pytest.raises(ConfigError, match=line):
        guard(**options)


@pytest.mark.parametrize("given", [7.5, True, False, b"", b"1", ["1"]], ids=repr)
def test_key_that_gives_no_id(ledger: Ledger, given: Any) -> None:
    """An id is never guessed from something else, also not from what is false."""
    policy = Policy(on_missing_id="untracked")

    @once(ledger, consumer="billing", key=lambda: given, policy=policy)
    def work() -> None:
        pytest.fail("it ran")

    with pytest.raises(MessageError, match=r"key returned a \w+; return text, such as str\("):
        work()


def _generate(message: Message) -> Iterator[str]:
    yield message.id


async def _generate_async(message: Message) -> AsyncIterator[str]:
    yield message.id


class _Generates:
    def __call__(self, message: Message) -> Iterator[str]:
        yield message.id


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (functools.partial(_generate), "_generate is a generator"),
        (functools.partial(_generate_async), "_generate_async is a generator"),
        (_Generates(), "_Generates is a generator"),
        (classmethod(lambda cls: None), "put it below @classmethod"),
        (staticmethod(_work), "put it below @staticmethod"),
    ],
)
def test_functions_that_cannot_run_once(
    ledger: Ledger, guard: Decorate, function: Any, line: str
) -> None:
    """What does its work later, or is not a function yet, is refused by name."""
    for decorate in (guard(), idempotent_consumer(ledger)):
        with pytest.raises(ConfigError, match=line):
            decorate(function)


# ---- Transactions ------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine on a file with a ledger."""
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    with closing(open_ledger(engine)) as ledger:
        ledger.migrate()
    yield engine
    engine.dispose()


def test_ledger_of_an_async_engine(engine: Engine) -> None:
    """A ledger has connections of its own, which are not async: it is said what to hand over."""
    made = create_async_engine("postgresql+asyncpg://me:secret@db/shop")
    wrong: Any
    for wrong in (made, made.sync_engine):
        with pytest.raises(ConfigError, match=r"nor a sync engine; write .*postgresql") as told:
            open_ledger(wrong)
        assert "secret" not in str(told.value)
    with engine.connect() as connection:
        for wrong in (engine.url, connection, Session(engine), sessionmaker(engine), None):
            with pytest.raises(ConfigError, match="is neither a URL nor a sync engine; write"):
                open_ledger(wrong)


def test_transaction_of_what_begins_none(guard: Decorate, ledger: Ledger, engine: Engine) -> None:
    """Where an Engine is needed, what is in use already, or is not an engine at all, is refused."""
    with engine.connect() as connection, Session(engine) as session:
        wrong = (engine.url, "sqlite://", ledger, connection, session, AsyncSession())
        for each in (*wrong, scoped_session(sessionmaker(engine))):
            with pytest.raises(ConfigError, match=r"transaction: .* hand over an Engine"):
                guard(transaction=each)(_work)


def test_transaction_of_the_other_world(engine: Engine) -> None:
    """An async function needs an async engine, and a plain one a plain one."""

    async def work(message: Message) -> None: ...

    guard = functools.partial(_once, open_ledger(engine))
    async_engine = create_async_engine(engine.url.set(drivername="sqlite+aiosqlite"))
    plain: list[Any] = [engine, sessionmaker(engine)]
    others: list[Any] = [async_engine, async_sessionmaker(async_engine)]
    for each in plain:
        guard(transaction=each)(_work)
        with pytest.raises(ConfigError, match=r"work is async; hand over an AsyncEngine or"):
            guard(transaction=each)(work)
    for each in others:
        guard(transaction=each)(work)
        with pytest.raises(ConfigError, match=r"_work is not async; hand over an Engine or"):
            guard(transaction=each)(_work)


# ---- Work that is not done when its function returns -------------------------------------------


def _unawaited(*_: Any) -> Awaitable[None]:
    return asyncio.sleep(0)


def _ungenerated(*_: Any) -> Iterator[str]:
    return _generate(Message("1"))


def _ungenerated_async(*_: Any) -> AsyncIterator[str]:
    return _generate_async(Message("1"))


@pytest.mark.parametrize("function", [_unawaited, _ungenerated, _ungenerated_async])
@pytest.mark.filterwarnings("error")
def test_unfinished_work(ledger: Ledger, guard: Decorate, function: Any) -> None:
    """What has only been begun is never taken for done: it is a failure, and recorded as one."""
    with pytest.raises(ConfigError, match=rf"{function.__name__} returned a \w+, whose work"):
        guard()(function)()
    assert record_of(ledger, Key("billing", "1")).state is State.FAILED


def test_begun_task_is_stopped(guard: Decorate) -> None:
    """A task that a plain function has begun does not go on as if its message were handled."""
    begun: list[asyncio.Task[None]] = []

    def work() -> asyncio.Task[None]:
        begun.append(asyncio.create_task(asyncio.sleep(3_600)))
        return begun[0]

    async def main() -> None:
        with pytest.raises(ConfigError, match="work returned a Task"):
            guard()(work)()
        assert begun[0].cancelling()

    asyncio.run(main())


# ---- Messages among the arguments --------------------------------------------------------------


def test_message_by_name(ledger: Ledger, guard: Decorate) -> None:
    """A message handed over by name is seen like any other: its body counts."""

    def work(*, message: Message) -> None: ...

    for decorate in (guard(fingerprint=True), idempotent_consumer(ledger)):
        function: Any = decorate(work)
        with message_context("1", "orders"):
            function(message=Message("1", b"pens"))
            function(message=Message("1", b"pens"))
            with pytest.raises(MismatchError):
                function(message=Message("1", b"ink"))


# ---- Fingerprints ------------------------------------------------------------------------------


class _Size(enum.Enum):
    SMALL = 1


@dataclass
class _Order:
    number: int
    lines: list[Any]
    seen: object = field(default=None, compare=False)


def values() -> list[Any]:
    """One of each kind that has a content."""
    return [
        [1, "a", None, True, 1.5, {"b": [1, 2], "a": 3}],
        *(Decimal("1.10"), UUID(int=7), b"\0a", _Size.SMALL),
        *(date(2024, 2, 29), datetime(2024, 2, 29, tzinfo=UTC), timedelta(days=1, seconds=1)),
        _Order(1, [_Order(2, [Decimal(3)])], object()),
    ]


def test_content_is_equal_in_another_process() -> None:
    """An honest repetition has the same content in whatever process it is met."""
    program = (
        "from tests.unit.test_mistakes import values, content_of\n"
        "print([content_of(value) for value in values()])"
    )
    assert printed(program).strip() == str([content_of(value) for value in values()])


def test_contents_differ() -> None:
    """What is not equal has another content, also where it looks the same as text."""
    others = ["1.10", Decimal("1.11"), str(UUID(int=7)), "SMALL", "2024-02-29", _Order(1, [])]
    contents = [content_of([value]) for value in (*values(), *others)]
    assert len(set(contents)) == len(contents)


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), [object()], {(1, 2): 3}, _endless(), lambda: 1, _Order, _Order(1, [{1}])],
)
def test_values_without_content(guard: Decorate, value: Any) -> None:
    """What could differ from process to process is refused, whoever gives it."""
    for options in ({"fingerprint": True}, {"fingerprint": lambda _: value}):
        with pytest.raises(
            MessageError, match=r"fingerprint: .*; write fingerprint= as a function"
        ):
            guard(**options)(_work)(value)


def test_methods_need_a_fingerprint_of_their_own(guard: Decorate) -> None:
    """On a method, True would count the object that it belongs to: it says so."""

    class Billing:
        @guard(fingerprint=True)  # type: ignore[untyped-decorator]
        def charge(self, amount: int) -> None: ...

        @guard(fingerprint=lambda self, amount: amount)  # type: ignore[untyped-decorator]
        def refund(self, amount: int) -> None: ...

    Billing().refund(5)
    with pytest.raises(MessageError, match="Billing has no JSON form"):
        Billing().charge(5)


# ---- Messages ----------------------------------------------------------------------------------

UNUSABLE = {
    "id": Message(""),
    "body": Message("1", "text"),  # type: ignore[arg-type]
    "type": Message("1", type="a\0"),
    "source": Message("1", source=b"shop"),  # type: ignore[arg-type]
    "content_type": Message("1", content_type=None),  # type: ignore[arg-type]
    "key": Message("1", key=7),  # type: ignore[arg-type]
    "key with a lone surrogate": Message("1", key="\ud800"),
    "headers": Message("1", headers=[("a", "b")]),  # type: ignore[arg-type]
    "header": Message("1", headers={"a": 1}),  # type: ignore[dict-item]
    "time": Message("1", time="2024-02-29"),  # type: ignore[arg-type]
}
unusable = pytest.mark.parametrize(
    ("what", "message"), UNUSABLE.items(), ids=[what.replace(" ", "_") for what in UNUSABLE]
)


def test_usable_messages() -> None:
    """A message may lack all but its id; that, too, where a policy knows what to do."""
    for message in (Message("1"), Message("1", b"x", key="", headers={"": "\0"})):
        assert check_message(message) is message
    check_message(Message(""), needs_id=False)
    with pytest.raises(MessageError, match="id is not a string"):
        check_message(Message(7), needs_id=False)  # type: ignore[arg-type]


@unusable
def test_unusable_messages_fail_where_they_are_sent(
    ledger: Ledger, what: str, message: Message
) -> None:
    """What cannot be published fails in the handler that sends it, and not later in a relay."""
    with pytest.raises(MessageError, match=what), _claimed(ledger) as work:
        work.processing.send("post", message)
    service = IdempotenceService(ledger, "mailing")
    service.processing_status(Message("1"))
    with pytest.raises(MessageError, match=what):
        service.add_deferred_message(Message("1"), message)


# ---- Probes ------------------------------------------------------------------------------------


def test_probe_that_is_async() -> None:
    """A probe is called from plain functions, too: an async one is refused."""

    async def probe(message: Message) -> str:
        return "happened"

    with pytest.raises(
        ConfigError, match="on_in_doubt: the probe is async; write it without async"
    ):
        Policy(on_in_doubt=probe)  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [None, True, "Happened", ["happened"]])
def test_probe_with_another_answer(
    ledger: Ledger, clock: ManualClock, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    """An answer that is none of the three decides nothing; it is logged as it was."""
    granted(ledger.claim(Key("billing", "1"), "60s"))
    clock.advance(61)
    work = _once(ledger, policy=Policy(on_in_doubt=lambda _: answer))(_work)
    with pytest.raises(InDoubtError):
        work(Message("1"))
    [logged] = of_event(caplog, "probe_answer_unusable")
    assert vars(logged)["answer"] == repr(answer)
