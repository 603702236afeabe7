"""What a handler can do with the message that it processes: steps, and messages to be sent."""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, cast

from oncely._util.unawaited import Unawaited
from oncely.core.destination import check_destination
from oncely.core.durations import Duration, seconds
from oncely.core.errors import ConfigError, FencedError, MessageError
from oncely.core.ids import check_id
from oncely.core.message import Message, entered
from oncely.core.record import Claim, Key, idempotency_key
from oncely.core.turn import Turn, Untracked
from oncely.core.waiting import WaitingMessage, deferred_id
from oncely.ledger.arguments import sent_message
from oncely.ledger.driver import Driver, SyncDriver, run_inline
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.results import Serializer, given_back, kept, serializer_of
from oncely.lifecycle.wrapping import is_async

T = TypeVar("T")

MOST_DEFERRED = 10_000
"""Messages that one handler may send."""


@dataclass(slots=True, eq=False, repr=False)
class ClaimContext:
    """What the handler of a message may call while it runs under `claim`, as Processing says.

    `driver` is that of its thread or task; `message`, where there is one, is what the handler was
    given; `lifecycle` keeps the claim, and is None where a transaction keeps others away. Any
    number of threads and tasks of the handler may use it.
    """

    claim: Claim
    _driver: Driver
    message: Message | None
    _lifecycle: Lifecycle | None
    _lock: threading.Lock
    is_over: bool = False
    _results: dict[str, Any] | None = None
    _running: set[str] = field(default_factory=set)
    _deferred: dict[tuple[str, str], WaitingMessage] = field(default_factory=dict)
    _unawaited: Unawaited | None = None
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
        if not self._driver.calls.can_defer:
            raise ConfigError(
                f"{what}: this ledger keeps no steps and defers no messages; open it on a "
                'database, as in "postgresql://user@host/database"'
            )

    # ---- Steps ---------------------------------------------------------------------------------

    def step(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        check_id(name, "step name")
        self._check(f"step {name!r}")
        if not callable(function):
            raise MessageError(
                f"step {name!r}: pass the function and then its arguments, not its result"
            )
        serializer = serializer_of(function, keep_result=True)
        if is_async(function):
            self._unawaited = self._unawaited or Unawaited()
            return self._unawaited.note(name, self._async_step(name, serializer, function, args))
        if not self._driver.may_block:
            raise MessageError(
                f"step {name!r}: inside a transaction of asyncio, pass an async function"
            )
        blocking = SyncDriver(self._driver.calls)
        with self._begun(name):
            if name not in run_inline(self._kept(blocking)):
                with entered(StepContext(self, name)):
                    result = _done(name, function(*args))
                return run_inline(self._keep(blocking, serializer, name, result))
            return self._given_back(serializer, name)

    def check_awaited(self, error: BaseException | None = None) -> None:
        name = None if self._unawaited is None else self._unawaited.forgotten()
        if name is not None and error is None:
            raise MessageError(
                f"step {name!r} was not awaited, and has not run; write `await message.step(...)`"
            )

    async def _async_step(
        self, name: str, serializer: Serializer, function: Callable[..., Any], args: Sequence[Any]
    ) -> Any:
        with self._begun(name):
            if name not in await self._kept(self._driver):
                with entered(StepContext(self, name)):
                    result = await function(*args)
                return await self._keep(self._driver, serializer, name, result)
            return self._given_back(serializer, name)

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

    async def _kept(self, driver: Driver) -> dict[str, Any]:
        """The results of the finished steps. Raises where the claim may have run out, or where the
        handler has ended.
        """
        if self._results is None:
            found = dict(await self._ask(driver, driver.calls.steps, self.claim.key))
            with self._lock:
                # Of steps that run at the same time the first to read decides: others would forget
                # what it has kept since.
                if self._results is None:
                    self._results = found
        self._check("step")
        lifecycle = self._lifecycle
        if lifecycle is not None and not lifecycle.heartbeat.is_good(self.claim):
            raise FencedError("no step was begun: the claim may have run out")
        return self._results

    async def _keep(self, driver: Driver, serializer: Serializer, name: str, result: Any) -> Any:
        """Keep a step's result; return it as a later attempt will read it."""
        assert self._results is not None  # noqa: S101 - they were read before the step ran.
        self._results[name] = made = kept(serializer, result, self.claim.key)
        # The step has had its effect: giving up would let the next attempt repeat the effect.
        await self._ask(driver, driver.calls.keep_step, self.claim, name, made)
        return result if made is None else self._given_back(serializer, name)

    async def _ask(self, driver: Driver, call: Callable[..., T], *args: Any) -> T:
        """What `call` returns: repeated while the store is away, until the lease is over."""
        if self._lifecycle is None:
            return await driver.run(call, *args)
        return await self._lifecycle.retried(driver, [self.claim], lambda: driver.run(call, *args))

    def _given_back(self, serializer: Serializer, name: str) -> Any:
        return given_back(serializer, (self._results or {})[name], self.claim.key)

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


class StepContext:
    """What may be called while a step runs. It does not send: a retry skips the step, and would not
    send.
    """

    is_over = False

    def __init__(self, context: ClaimContext, name: str) -> None:
        self._name = name
        self.message = context.message
        self.claim = context.claim
        self.idempotency_key = context.idempotency_key
        self.step_key = context.step_key
        self.step = context.step

    def send(self, destination: str, content: Any, delay: Duration | None = None) -> NoReturn:  # noqa: ARG002
        raise MessageError(
            f"send to {destination!r}: a retry skips the finished step {self._name!r}, and would "
            "not send the message; send it after the step"
        )


class UntrackedContext:
    """What the handler of a message may call that runs without a claim: its steps run every time,
    and what needs a claim raises MessageError.
    """

    is_over = False

    def __init__(self, message: Message | None = None) -> None:
        self.message = message

    def end(self) -> Sequence[WaitingMessage]:
        return ()

    def check_awaited(self, error: BaseException | None = None) -> None:
        """Nothing: its steps are the functions themselves."""

    @property
    def claim(self) -> Claim:
        raise _untracked("claim")

    @property
    def idempotency_key(self) -> str:
        raise _untracked("idempotency_key")

    def step_key(self, name: str) -> str:
        raise _untracked(f"key for step {name!r}")

    def step(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        check_id(name, "step name")
        if is_async(function):
            return function(*args)
        return _done(name, function(*args))

    def send(self, destination: str, content: Any, delay: Duration | None = None) -> str:  # noqa: ARG002
        raise _untracked(f"outbox for a message to {destination!r}")


def _untracked(what: str) -> MessageError:
    return MessageError(f"this message is not tracked: there is no {what}")


def context_of(turn: Turn, driver: Driver, lifecycle: Lifecycle) -> ClaimContext | UntrackedContext:
    """What the handler of a turn may call, which runs now: the same where a middleware lets it run
    more than once.
    """
    if turn.context is not None:
        return cast(ClaimContext | UntrackedContext, turn.context)
    if isinstance(turn.outcome, Untracked):
        context: ClaimContext | UntrackedContext = UntrackedContext(turn.message)
    else:
        assert turn.claim is not None  # noqa: S101 - no other turn is run.
        kept_by = None if driver.is_joined else lifecycle
        context = ClaimContext(turn.claim, driver, turn.message, kept_by, threading.Lock())
    turn.context = context
    return context
