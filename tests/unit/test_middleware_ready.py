"""The ready-made middleware, each in the chain of a handler, sync and async."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from prometheus_client import CollectorRegistry
from tests.conditions import LIMIT_S
from tests.logs import events_in
from tests.processes import printed
from tests.records import record_of

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.middleware import (
    CallNext,
    Idempotent,
    Logged,
    Measured,
    Middleware,
    RateLimited,
    TimeLimit,
    Traced,
)
from oncely.middleware.chain import chained, chained_async
from oncely.testing import ManualClock, at_once

KEY = Key("billing", "abc-123")
MESSAGE = Message("abc-123", b'{"secret": 1}', "order.placed", {"token": "secret"})

Run = Callable[..., Any]


def run_sync(middleware: Middleware, handler: CallNext, message: Message = MESSAGE) -> Any:
    """What the handler comes to behind the middleware."""
    return chained([middleware], handler)(message)


def run_async(middleware: Middleware, handler: CallNext, message: Message = MESSAGE) -> Any:
    """The same with the handler made async."""

    async def handle(message: Message) -> Any:
        await asyncio.sleep(0)
        return handler(message)

    async def main() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await chained_async([middleware], handle)(message)

    return asyncio.run(main())


@pytest.fixture(params=[run_sync, run_async], ids=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    """Both ways."""
    way: Run = request.param
    return way


def handled(message: Message) -> str:
    """A handler."""
    return "done"


def failing(message: Message) -> None:
    """A handler that fails, with what must not be shown in its error."""
    raise ValueError("secret")


def stopped(message: Message) -> None:
    """A handler that is stopped."""
    raise asyncio.CancelledError


# ---- Idempotent ----------------------------------------------------------------------------------


@pytest.fixture
def ran() -> list[str]:
    """The ids of the messages whose handler ran."""
    return []


@pytest.fixture
def handler(ran: list[str]) -> CallNext:
    """A handler whose results tell them apart."""

    def handle(message: Message) -> str:
        ran.append(message.id)
        return f"receipt {len(ran)}"

    return handle


def test_runs_once(run: Run, ledger: Ledger, handler: CallNext, ran: list[str]) -> None:
    """An error is recorded and raised; the next delivery runs the handler and is completed; a
    duplicate runs nothing behind.
    """
    idempotent = Idempotent(ledger, "billing")
    with pytest.raises(ValueError, match="secret"):
        run(idempotent, failing)
    assert record_of(ledger, KEY).error == "ValueError: secret"
    assert run(idempotent, handler) == "receipt 1"
    assert run(idempotent, handler) is None
    assert ran == ["abc-123"]
    assert record_of(ledger, KEY).state is State.COMPLETED


# ---- Logged ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "error", "outcome", "level"),
    [
        (handled, None, "handled", logging.DEBUG),
        (failing, ValueError, "failed", logging.WARNING),
        (stopped, asyncio.CancelledError, "stopped", logging.DEBUG),
    ],
)
def test_logged(
    run: Run,
    caplog: pytest.LogCaptureFixture,
    handler: CallNext,
    error: type[BaseException] | None,
    outcome: str,
    level: int,
) -> None:
    """A line says what was handled, of which type, how it ended and how long it took; nothing of
    the content. An error goes on; to be stopped is no failure.
    """
    caplog.set_level(logging.DEBUG, "oncely.middleware.logging")
    with pytest.raises(error) if error else nullcontext():
        run(Logged(logging.DEBUG), handler)
    [line] = caplog.records
    said = vars(line)
    assert (said["event"], line.levelno) == (f"message_{outcome}", level)
    assert (said["message_id"], said["type"]) == ("abc-123", "order.placed")
    assert said["outcome"] == outcome
    assert isinstance(said["took_s"], float)
    assert "secret" not in repr(said)


# ---- Measured ----------------------------------------------------------------------------------


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of the test's own."""
    return CollectorRegistry()


def test_measured(run: Run, registry: CollectorRegistry) -> None:
    """What was handled and what failed is counted and timed by type; meanwhile it is in flight."""
    measured, value = Measured(registry), registry.get_sample_value
    in_flight = []

    def handler(message: Message) -> None:
        in_flight.append(value("oncely_messages_in_flight"))

    run(measured, handler)
    with pytest.raises(ValueError, match="secret"):
        run(measured, failing)
    labels = {"type": "order.placed"}
    assert value("oncely_messages_handled_total", labels) == 1
    assert value("oncely_messages_failed_total", labels) == 1
    assert value("oncely_message_duration_seconds_count", labels) == 2
    assert in_flight == [1]
    with pytest.raises(asyncio.CancelledError):
        run(measured, stopped)
    # What was stopped counts neither way.
    assert value("oncely_messages_handled_total", labels) == 1
    assert value("oncely_messages_failed_total", labels) == 1
    assert value("oncely_messages_in_flight") == 0


def test_measured_has_a_bound(registry: CollectorRegistry) -> None:
    """Beyond so many types all further ones are counted together."""
    call = chained([Measured(registry, most_types=3)], handled)
    for number in [*range(10), 0]:
        call(Message("abc-123", type=str(number)))
    counts = {
        sample.labels["type"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "oncely_messages_handled_total"
    }
    assert counts == {"0": 2, "1": 1, "2": 1, "other": 7}


def test_measured_breaks_nothing(
    run: Run, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the metrics is logged, and the message is handled all the same."""
    no_label: Any = ["a list"]
    assert run(Measured(registry), handled, Message("abc-123", type=no_label)) == "done"
    assert events_in(caplog) == ["metrics_failed"]
    assert registry.get_sample_value("oncely_messages_in_flight") == 0


def test_measured_twice(registry: CollectorRegistry) -> None:
    """A second one in a registry is told to be one too many."""
    Measured(registry)
    with pytest.raises(ConfigError, match="has a Measured already"):
        Measured(registry)


# ---- RateLimited -------------------------------------------------------------------------------


class Waits:
    """Waiting that moves a clock, and notes for how long."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.waited: list[float] = []

    def limited(self, per_second: float, burst: int) -> RateLimited:
        return RateLimited(per_second, burst, clock=self.clock, wait=self._wait, sleep=self._sleep)

    def _wait(self, _: threading.Event, seconds: float) -> bool:
        self.waited.append(round(seconds, 3))
        self.clock.advance(seconds)
        return False

    async def _sleep(self, seconds: float) -> None:
        self._wait(threading.Event(), seconds)


@pytest.fixture
def waits() -> Waits:
    """Nothing in these tests waits for real."""
    return Waits()


def test_rate(run: Run, waits: Waits) -> None:
    """After the burst each message waits for its turn, and no longer."""
    limited = waits.limited(per_second=10, burst=3)
    assert [run(limited, handled) for _ in range(6)] == ["done"] * 6
    assert waits.waited == [0.1, 0.1, 0.1]


def test_threads_share_the_rate(waits: Waits) -> None:
    """Threads that come at once have turns of their own, one interval apart."""
    waited = []

    def wait(_: threading.Event, seconds: float) -> bool:
        waited.append(round(seconds, 3))
        return False

    limited = RateLimited(10, clock=waits.clock, wait=wait)
    at_once(8, lambda _: run_sync(limited, handled))
    assert sorted(waited) == [round(n / 10, 3) for n in range(1, 8)]


def test_waiting_can_be_stopped() -> None:
    """A thread that waits is stopped before its handler begins; what comes later waits again."""
    waiting, ran = threading.Event(), []

    def wait(stopping: threading.Event, seconds: float) -> bool:
        waiting.set()
        return stopping.wait(LIMIT_S)

    def handler(message: Message) -> None:
        ran.append(message.id)

    limited = RateLimited(0.001, wait=wait)
    run_sync(limited, handler)

    def call(number: int) -> None:
        if number == 0:
            with pytest.raises(asyncio.CancelledError):
                run_sync(limited, handler)
        else:
            assert waiting.wait(LIMIT_S)
            limited.stop()

    at_once(2, call)
    assert ran == ["abc-123"]
    later = RateLimited(0.001, wait=lambda stopping, _: stopping.is_set())
    later.stop()
    assert [run_sync(later, handled) for _ in range(2)] == ["done", "done"]


def test_waiting_in_a_task_can_be_cancelled() -> None:
    """A task that waits for its turn ends when it is cancelled, and its handler does not begin."""
    ran = []
    limited = RateLimited(0.001)

    async def handler(message: Message) -> None:
        ran.append(message.id)

    async def main() -> None:
        call = chained_async([limited], handler)
        await call(MESSAGE)
        task = asyncio.ensure_future(call(MESSAGE))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT_S)

    asyncio.run(main())
    assert ran == ["abc-123"]


@pytest.mark.parametrize(
    ("limited", "arguments", "text"),
    [
        (RateLimited, (0,), "per_second: 0 lets nothing through"),
        (RateLimited, (-1,), "per_second: -1"),
        (RateLimited, (float("nan"),), "per_second: nan"),
        (RateLimited, ("10",), "per_second: '10'"),
        (RateLimited, (10, 0), "burst: 0 is not a whole number of 1 or more"),
        (RateLimited, (10, 1.5), "burst: 1.5"),
        (TimeLimit, ("soon",), "limit: 'soon' is not a duration"),
        (TimeLimit, ("0s",), "a limit of zero"),
    ],
)
def test_limits_that_are_none(limited: Any, arguments: Any, text: str) -> None:
    """What lets nothing through is told when it is made."""
    with pytest.raises(ConfigError, match=text):
        limited(*arguments)


# ---- TimeLimit ---------------------------------------------------------------------------------


def time_limited(handler: CallNext, limit: str = "20ms") -> Any:
    """What an async handler comes to within the limit."""
    return asyncio.run(chained_async([TimeLimit(limit)], handler)(MESSAGE))  # type: ignore[arg-type]


def test_time_limit() -> None:
    """A handler that takes too long is cancelled, and has failed with an error that says so."""
    ended = []

    async def handler(message: Message) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(message.id)

    with pytest.raises(TimeoutError, match="took longer than 20ms"):
        time_limited(handler)
    assert ended == ["abc-123"]


def test_within_the_limit() -> None:
    """What is quick enough comes out as it was: its result, its error, its own timeouts."""

    async def quick(message: Message) -> str:
        return "done"

    async def times_out(message: Message) -> None:
        raise error

    error = TimeoutError("a database")
    assert time_limited(quick, "1h") == "done"
    with pytest.raises(TimeoutError) as raised:
        time_limited(times_out, "1h")
    assert raised.value is error


def test_time_limit_is_not_for_threads() -> None:
    """Around a handler that is not async it is refused, in every chain, and the reason is told."""
    text = "handled is not async, and a thread cannot be stopped: .*async def"
    with pytest.raises(ConfigError, match=text):
        chained([TimeLimit("30s")], handled)
    with pytest.raises(ConfigError, match=text):
        chained_async([TimeLimit("30s")], handled)


# ---- Traced ------------------------------------------------------------------------------------

SENT = Message(
    "abc-123",
    b"{}",
    "order.placed",
    {
        "Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "shop=17",
    },
)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Where the spans of a test go."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    """A tracer provider of the test's own."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


def spans(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """What has ended."""
    return list(exporter.get_finished_spans())


def test_traced(run: Run, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
    """A message has a span of its own, under the names of the messaging conventions. What sent the
    message is linked, with its state, and is not the parent.
    """
    assert run(Traced(provider, destination="orders", system="rabbitmq"), handled, SENT) == "done"
    [span] = spans(exporter)
    assert (span.name, span.kind) == ("process orders", SpanKind.CONSUMER)
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.message.id": "abc-123",
        "messaging.message.body.size": 2,
        "oncely.message.type": "order.placed",
    }
    assert span.parent is None
    assert span.context is not None
    [link] = span.links
    assert link.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert link.context.span_id == 0xB7AD6B7169203331
    assert link.context.is_remote
    assert link.context.trace_state.get("shop") == "17"
    assert span.context.trace_id != link.context.trace_id


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": 7}])
def test_nothing_to_link(
    run: Run, provider: TracerProvider, exporter: InMemorySpanExporter, headers: Any
) -> None:
    """Without a header that says who sent it, or with a bad one, there is a span and no link."""
    with provider.get_tracer("other").start_as_current_span("around"):
        run(Traced(provider), handled, Message("abc-123", headers=headers))
    assert [list(span.links) for span in spans(exporter)] == [[], []]


def test_handler_is_inside(
    run: Run, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """Spans of the handler are children of the message's."""

    def handler(message: Message) -> None:
        with provider.get_tracer("other").start_as_current_span("charge"):
            pass

    run(Traced(provider), handler, SENT)
    inner, outer = spans(exporter)
    assert inner.parent is not None
    assert inner.parent == outer.context
    assert not get_current_span().get_span_context().is_valid


def test_errors_are_recorded(
    run: Run, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """An error stands in the span, and goes on; to be stopped is none."""
    with pytest.raises(ValueError, match="secret"):
        run(Traced(provider), failing, SENT)
    [span] = spans(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "ValueError"
    assert [event.name for event in span.events] == ["exception"]
    with pytest.raises(asyncio.CancelledError):
        run(Traced(provider), stopped, SENT)
    assert spans(exporter)[-1].status.status_code is StatusCode.UNSET


def test_tracing_is_not_installed() -> None:
    """Where the package is missing, one line says what to type."""
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import oncely\n"
        "try:\n    from oncely.middleware import Traced\n"
        "except oncely.ConfigError as error:\n    print(error)"
    )
    said = printed(program)
    assert said.startswith("opentelemetry")
    assert said.endswith("is not installed; type: pip install 'oncely[tracing]'\n")
