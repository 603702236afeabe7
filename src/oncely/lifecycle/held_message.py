"""What a handler can do with the message that it processes: steps, and messages to be sent."""

import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from oncely._util.unawaited import Unawaited
from oncely.core.destination import check_destination
from oncely.core.durations import Duration, seconds
from oncely.core.errors import ConfigError, FencedError, MessageError
from oncely.core.ids import check_id
from oncely.core.message import Message, entered
from oncely.core.record import Claim, Key, idempotency_key
from oncely.core.waiting import WaitingMessage, deferred_id
from oncely.engine.async_calls import AsyncCalls
from oncely.engine.inline_calls import run_inline
from oncely.engine.request import sent_message
from oncely.lifecycle.patience import Holding
from oncely.lifecycle.results import Serializer, given_back, kept, serializer_of
from oncely.lifecycle.wrapping import is_async

T = TypeVar("T")

MOST_DEFERRED = 10_000
"""Messages that one handler may send."""


class HeldMessage:
    """A message whose handler runs under `claim`, as Processing says.

    `calls` are those of its thread or task; `message`, where there is one, is what the handler was
    given; there is a `holding`, unless a transaction keeps others away. Any number of
    threads and tasks of the handler may use it.
    """

    __slots__ = (
        "_deferred",
        "_holding",
        "_lock",
        "_results",
        "_running",
        "calls",
        "claim",
        "is_over",
        "message",
        "unawaited",
    )

    def __init__(
        self,
        claim: Claim,
        calls: AsyncCalls,
        message: Message | None = None,
        holding: Holding | None = None,
    ) -> None:
        self.claim = claim
        self.calls = calls
        self.message = message
        self.is_over = False
        self._holding = holding
        self._lock = threading.Lock()
        self._results: dict[str, Any] | None = None
        self._running: set[str] = set()
        self._deferred: dict[tuple[str, str], WaitingMessage] = {}
        self.unawaited: Unawaited | None = None
        """The steps that are async; None where there are none."""

    @property
    def idempotency_key(self) -> str:
        return idempotency_key(self.claim.key)

    def step_key(self, name: str) -> str:
        return idempotency_key(self.claim.key, name)

    def end(self) -> Sequence[WaitingMessage]:
        """Note that the handler has ended: later steps and sends raise. Return what it has sent."""
        with self._lock:
            self.is_over = True
            return [*self._deferred.values()] if self._deferred else ()

    def _check(self, what: str) -> None:
        if self.is_over:
            raise MessageError(f"{what}: the handler of this message has ended")
        if not self.calls.can_defer:
            raise ConfigError(
                f"{what}: this ledger keeps no steps and defers no messages; open it on a "
                'database, as in "postgresql://user@host/database"'
            )

    # ---- Steps ---------------------------------------------------------------------------------

    def step(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        self._check_step(name, function)
        serializer = serializer_of(function, keep_result=True)
        if is_async(function):
            self.unawaited = self.unawaited or Unawaited()
            return self.unawaited.note(name, self._async_step(name, serializer, function, args))
        blocking = self.calls.blocking
        if blocking is None:
            raise MessageError(
                f"step {name!r}: inside a transaction of asyncio, pass an async function"
            )
        with self._begun(name):
            if name not in run_inline(self._kept(blocking)):
                with entered(InStep(self, name)):
                    result = _done(name, function(*args))
                return run_inline(self._keep(blocking, serializer, name, result))
            return self._given_back(serializer, name)

    def check_awaited(self) -> None:
        """Raise MessageError where a step was not awaited: it has not run."""
        if self.unawaited is not None and (name := self.unawaited.forgotten()):
            raise MessageError(
                f"step {name!r} was not awaited, and has not run; write `await message.step(...)`"
            )

    async def _async_step(
        self, name: str, serializer: Serializer, function: Callable[..., Any], args: Sequence[Any]
    ) -> Any:
        with self._begun(name):
            if name not in await self._kept(self.calls):
                with entered(InStep(self, name)):
                    result = await function(*args)
                return await self._keep(self.calls, serializer, name, result)
            return self._given_back(serializer, name)

    def _check_step(self, name: str, function: object) -> None:
        check_id(name, "step name")
        self._check(f"step {name!r}")
        if not callable(function):
            raise MessageError(
                f"step {name!r}: pass the function and then its arguments, not its result"
            )

    @contextmanager
    def _begun(self, name: str) -> Iterator[None]:
        with self._lock:
            if name in self._running:
                raise MessageError(f"step {name!r} is running already")
            self._running.add(name)
        try:
            yield
        finally:
            self._running.discard(name)

    async def _kept(self, calls: AsyncCalls) -> dict[str, Any]:
        """The results of the finished steps. Raises where the claim may have run out, or where the
        handler has ended.
        """
        if self._results is None:
            self._results = dict(await self.say(calls, lambda: calls.steps(self.claim.key)))
        self._check("step")
        if self._holding is not None and not self._holding.is_good(self.claim):
            raise FencedError("no step was begun: the claim may have run out")
        return self._results

    async def _keep(self, calls: AsyncCalls, serializer: Serializer, name: str, result: Any) -> Any:
        """Keep a step's result; return it as a later attempt will read it."""
        assert self._results is not None  # noqa: S101 - they were read before the step ran.
        self._results[name] = made = kept(serializer, result, self.claim.key)
        # The step has had its effect: giving up would let the next attempt repeat the effect.
        await self.say(calls, lambda: calls.keep_step(self.claim, name, made))
        return result if made is None else self._given_back(serializer, name)

    def _given_back(self, serializer: Serializer, name: str) -> Any:
        return given_back(serializer, (self._results or {})[name], self.claim.key)

    async def say(self, calls: AsyncCalls, speak: Callable[[], Awaitable[T]]) -> T:
        """What `speak` returns: repeated while the store is away, until the lease is over."""
        if self._holding is None:
            return await speak()
        return await self._holding.say(calls, self.claim, speak)

    # ---- Deferred messages ---------------------------------------------------------------------

    def send(self, destination: str, content: Any, delay: Duration | None = None) -> str:
        self._check(f"send to {destination!r}")
        with self._lock:
            position = len(self._deferred)
            sent = deferred_message(self.claim.key, position, destination, content, delay)
            there = self._deferred.setdefault((sent.id, destination), sent)
        if there.message != sent.message:
            raise MessageError(f"{sent.id!r} was sent to {destination!r} with other content")
        return sent.id


def deferred_message(
    parent: Key, position: int, destination: str, content: Any, delay: Duration | None = None
) -> WaitingMessage:
    """What the handler of `parent` sends at that place. Raises MessageError and ConfigError."""
    if position >= MOST_DEFERRED:
        raise MessageError(f"a handler may send {MOST_DEFERRED:,} messages, and no more")
    check_destination(destination)
    message = sent_message(content, deferred_id(parent, position))
    delay_s = 0.0 if delay is None else seconds(delay, "delay")
    return WaitingMessage(message.id, destination, message, parent, position, delay_s)


def _done(name: str, result: Any) -> Any:
    """`result`, of a function that is not async."""
    if inspect.isawaitable(result):
        getattr(result, "close", lambda: None)()
        raise MessageError(
            f"step {name!r}: its function returned an awaitable; pass the async function itself, "
            "and its arguments after it"
        )
    return result


class InStep:
    """The processing while a step runs. It does not send: a retry skips the step, and would not
    send.
    """

    is_over = False

    def __init__(self, held: HeldMessage, name: str) -> None:
        self._held = held
        self._name = name
        self.message = held.message
        self.claim = held.claim
        self.idempotency_key = held.idempotency_key
        self.step_key = held.step_key
        self.step = held.step

    def send(self, destination: str, content: Any, delay: Duration | None = None) -> NoReturn:  # noqa: ARG002
        raise MessageError(
            f"send to {destination!r}: a retry skips the finished step {self._name!r}, and would "
            "not send the message; send it after the step"
        )


class Untracked:
    """A message that runs without a claim, because the policy says so: nothing is remembered."""

    is_over = False

    def __init__(self, message: Message | None = None, *, is_outage: bool = False) -> None:
        self.message = message
        self.is_outage = is_outage
        """Whether that is because the store is away."""

    @property
    def claim(self) -> Claim:
        """There is none: raises MessageError."""
        raise _untracked("claim")

    @property
    def idempotency_key(self) -> str:
        """There is none: raises MessageError."""
        raise _untracked("idempotency_key")

    def step_key(self, name: str) -> str:
        """There is none: raises MessageError."""
        raise _untracked(f"key for step {name!r}")

    def step(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """What `function` returns; it runs every time."""
        check_id(name, "step name")
        if is_async(function):
            return function(*args)
        return _done(name, function(*args))

    def send(self, destination: str, content: Any, delay: Duration | None = None) -> str:  # noqa: ARG002
        """Nothing can be deferred: raises MessageError."""
        raise _untracked(f"outbox for a message to {destination!r}")


def _untracked(what: str) -> MessageError:
    return MessageError(f"this message is not tracked: there is no {what}")
