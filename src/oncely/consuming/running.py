"""Running: a turn's way through the middleware to its handler, and back."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from oncely.consuming.handlers import Handlers
from oncely.consuming.turn import DeliveryTurn, current_turn
from oncely.core.errors import ConfigError, FencedError, MessageError
from oncely.core.message import Message, entered
from oncely.core.verdicts import Phase
from oncely.engine.request import json_value
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.held_message import HeldMessage, Untracked
from oncely.lifecycle.keeping import Keeping
from oncely.lifecycle.patience import Patience
from oncely.lifecycle.transacting import run, run_async, run_together
from oncely.lifecycle.turn import Kept
from oncely.lifecycle.wrapping import ended, is_async
from oncely.middleware.chain import BothWays, Middleware, chained, chained_async
from oncely.middleware.threads import Threads

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Parts:
    """What stands between a delivery and its end."""

    outer: Sequence[Middleware]
    """What every message goes through, duplicates too."""
    inner: Sequence[Middleware]
    """What only those go through whose handler runs."""
    handlers: Handlers
    handling: Handling | None
    begins: Any = None
    """A Begins or AsyncBegins where handlers work in one transaction with their claims."""
    is_together: bool = False
    """Whether handlers take all the messages of a transaction at once."""

    @property
    def are_async(self) -> bool:
        """Whether any handler or middleware is."""
        middleware = (each for each in (*self.outer, *self.inner) if not isinstance(each, BothWays))
        return self.handlers.are_async or any(map(is_async, middleware))

    @property
    def keeping(self) -> Keeping | None:
        """What waits in the ledger, where anything may."""
        return None if self.handling is None else self.handling.keeping

    def for_one_run(self, stop: threading.Event, grace_s: float) -> Self:
        """The same for a consumer that `stop` is to stop, which may take `grace_s` then."""
        if self.handling is None:
            return self
        patience = Patience(stop, grace_s)
        return replace(
            self, handling=replace(self.handling, is_stopping=stop.is_set, patience=patience)
        )

    @property
    def joined(self) -> Handling:
        """That of handlers in transactions."""
        assert self.handling is not None  # noqa: S101 - without a ledger there are none.
        return self.handling


class Running:
    """Runs turns, one after another, for handlers and middleware of which none is async."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._inner = chained(parts.inner, self._handle)
        self._outer = chained(parts.outer, self._barrier)

    def run_together(self, turns: Sequence[DeliveryTurn]) -> None:
        """Run these in one transaction where all succeed, which is stored then; else they are as
        they were.
        """
        together = [turn for turn in turns if turn.key is not None]

        def run_all(link: Any) -> bool:
            for turn in together:
                turn.link = link
            return self.run_all(together)

        if len(together) > 1:
            run_together(self._parts.joined, self._parts.begins, together, run_all)

    def run_all(self, turns: Sequence[DeliveryTurn]) -> bool:
        """Run these, which share a transaction, until one fails; whether none has."""
        for turn in turns:
            self.run(turn)
            if turn.error is not None:
                return False
        return True

    def run(self, turn: DeliveryTurn) -> None:
        """Run it; what is raised is kept with it."""
        with _timed(turn):
            self._outer(turn.message)

    def _barrier(self, message: Message) -> Any:
        turn, parts = current_turn.get(), self._parts
        _check(turn, message, parts.handling)
        if isinstance(turn.begun, Kept):
            return turn.begun.result
        if turn.begun is not None:
            with entered(turn.begun):
                return self._work(turn, message, turn.link)
        return run(parts.joined, parts.begins, turn, lambda link: self._work(turn, message, link))

    def _work(self, turn: DeliveryTurn, message: Message, link: Any) -> Any:
        with _at_work(turn, link):
            turn.result = _kept(self._parts.handling, self._inner(message))
        return turn.result

    def _handle(self, message: Message) -> Any:
        turn = _calling()
        return turn.handler(message) if turn.link is None else turn.handler(message, turn.link)


class RunningTogether(Running):
    """The same for handlers that take all the messages of a transaction at once."""

    def run_all(self, turns: Sequence[DeliveryTurn]) -> bool:
        """Hand these to their handlers, as far as they are granted; whether none fails."""
        granted = [turn for turn in turns if isinstance(turn.begun, HeldMessage)]
        by_handler: dict[Callable[..., Any], list[DeliveryTurn]] = defaultdict(list)
        for turn in granted:
            by_handler[turn.handler].append(turn)
            turn.phase = Phase.CALLED
        began = time.perf_counter()
        try:
            for handler, those in by_handler.items():
                ended(handler, [turn.message for turn in those], those[0].link)
        except BaseException:  # noqa: BLE001 - each alone tells what is wrong, and with which.
            _log.info("handler_of_many_failed", exc_info=True)
            return False
        for turn in granted:
            turn.took_s = (time.perf_counter() - began) / len(granted)
        return True

    def _handle(self, message: Message) -> Any:
        turn = _calling()
        # As in a window: there no message is the one that is being processed.
        with entered(None):
            return turn.handler([message], turn.link)


def check_together(parts: Parts) -> None:
    """Raise ConfigError where handlers cannot take all the messages of a transaction at once."""
    if parts.are_async:
        raise ConfigError("transactional: together is for handlers that are not async")
    if parts.outer or parts.inner:
        raise ConfigError(
            "transactional: a middleware stands around one message; leave out together=True"
        )
    if parts.handling is not None and parts.handling.keeps_result:
        raise ConfigError('transactional: together keeps no results; write Policy(results="off")')


class AsyncRunning:
    """The same where some are async, for the tasks of a loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._threads = Threads()
        self._inner = chained_async(parts.inner, self._handle)
        self._outer = chained_async(parts.outer, self._barrier)

    async def run(self, turn: DeliveryTurn) -> None:
        """Run it; what is raised is kept with it."""
        with _timed(turn):
            await self._outer(turn.message)

    async def _barrier(self, message: Message) -> Any:
        turn, parts = current_turn.get(), self._parts
        _check(turn, message, parts.handling)
        if isinstance(turn.begun, Kept):
            return turn.begun.result
        if turn.begun is not None:
            with entered(turn.begun):
                return await self._work(turn, message, turn.link)
        return await run_async(
            parts.joined, parts.begins, turn, lambda link: self._work(turn, message, link)
        )

    async def _work(self, turn: DeliveryTurn, message: Message, link: Any) -> Any:
        with _at_work(turn, link):
            turn.result = _kept(self._parts.handling, await self._inner(message))
        return turn.result

    async def _handle(self, message: Message) -> Any:
        turn = _calling()
        call: Callable[..., Any] = turn.handler
        args = (message,) if turn.link is None else (message, turn.link)
        if is_async(call):
            return await call(*args)
        return await self._threads.run(ended, call, *args)


@contextmanager
def _timed(turn: DeliveryTurn) -> Iterator[None]:
    """While the turn runs; what is raised is kept with it."""
    turn.phase = Phase.STARTED
    began, token = time.perf_counter(), current_turn.set(turn)
    try:
        yield
        # Where there is a record, the failure stands there already, or will.
        if isinstance(turn.begun, Untracked):
            turn.error = None
    except BaseException as error:  # noqa: BLE001 - the turn has it.
        _raised(turn, error)
    finally:
        current_turn.reset(token)
        turn.took_s = time.perf_counter() - began


@contextmanager
def _at_work(turn: DeliveryTurn, link: Any) -> Iterator[None]:
    """While what stands behind the claim runs."""
    turn.link, turn.error, turn.phase = link, None, Phase.RUNNING
    try:
        yield
    except BaseException as error:
        turn.error = error
        raise


def _check(turn: DeliveryTurn, message: Message, handling: Handling | None) -> None:
    """Raise where the handler is not to run, nor anything else that stands behind."""
    held = turn.begun if turn.link is None else None
    if isinstance(held, HeldMessage) and handling and not handling.heartbeat.is_good(held.claim):
        # This process was stopped for long; or the store was, and the claim could not be extended.
        turn.refusal = FencedError("its claim may have run out before its handler began")
    if turn.refusal is not None:
        raise turn.refusal
    if message.id != turn.message.id:
        raise MessageError(
            f"a middleware before `idempotent` made {message.id!r} of {turn.message.id!r}; "
            "the id is to stay as it is"
        )


def _raised(turn: DeliveryTurn, error: BaseException) -> None:
    if error is turn.error or error is turn.refusal:
        return
    has_run = turn.phase >= Phase.RUNNING
    if has_run or turn.refusal is not None or isinstance(turn.begun, Kept):
        # How the message ended is known: it is not undone by what was to come after.
        _log.error("middleware_failed", exc_info=error)
    else:
        turn.error = error


def _kept(handling: Handling | None, result: Any) -> Any:
    return json_value(result) if handling is not None and handling.keeps_result else result


def _calling() -> DeliveryTurn:
    turn = current_turn.get()
    # In this order: who gives claims back ends them first, and then looks which were called.
    turn.phase = Phase.CALLED
    if isinstance(turn.begun, HeldMessage) and turn.begun.is_over:
        raise asyncio.CancelledError
    return turn
