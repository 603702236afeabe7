"""Runner: calls a turn's handler through the middleware."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from oncely._util.event_log import EventLog
from oncely.consumer.settings import ConsumerSettings
from oncely.consumer.turn import DeliveryTurn, current_turn
from oncely.core.errors import ConfigError, FencedError, MessageError
from oncely.core.message import Message, Processing, entered
from oncely.core.turn import Progress, TurnState, Untracked, leaves_doubt
from oncely.ledger.driver import Driver
from oncely.lifecycle.handler_context import UntrackedContext, context_of
from oncely.lifecycle.transacting import run, run_async, run_together
from oncely.lifecycle.wrapping import ended, is_async
from oncely.middleware.chain import chained, chained_async
from oncely.middleware.threads import Threads

_log = EventLog(__name__)


class _AnyRunner:
    """What runners for handlers of both kinds have in common."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings = settings

    @contextmanager
    def _running(self, turn: DeliveryTurn) -> Iterator[None]:
        """For a block that runs a turn with all middleware: its time is measured, and what is
        raised is kept with the turn.
        """
        turn.started()
        token = current_turn.set(turn)
        began = time.perf_counter()
        try:
            yield
            if isinstance(turn.outcome, Untracked):
                # If there is a record, the failure is stored there already, or will be.
                turn.raised(None)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything.
            _raised(turn, error)
        finally:
            turn.took_s = time.perf_counter() - began
            current_turn.reset(token)

    def _entered(self, message: Message) -> DeliveryTurn:
        """The turn whose outer middleware has called the rest of the chain with this message.
        Raises if the handler, and the middleware around it, must not run.
        """
        turn, lifecycle = current_turn.get(), self._settings.lifecycle
        if turn.state >= TurnState.ENDED:
            raise FencedError("the message has ended, or was given back")
        claim = turn.claim if turn.link is None else None
        if lifecycle is not None and claim is not None and not lifecycle.heartbeat.is_good(claim):
            # This process was paused for long, or the store was down and the claim was not
            # extended.
            turn.refused(FencedError("its claim may have run out before its handler began"))
        if turn.refusal is not None:
            raise turn.refusal
        if message.id != turn.message.id:
            raise MessageError(
                f"a middleware before `idempotent` made {message.id!r} of {turn.message.id!r}; "
                "leave the id unchanged"
            )
        return turn

    def _context(self, turn: DeliveryTurn, *, is_async: bool = False) -> Processing:
        """What the handler of a turn may call."""
        lifecycle = self._settings.lifecycle
        if lifecycle is None:
            return UntrackedContext(turn.message)
        own = lifecycle.async_driver if is_async else lifecycle.sync_driver
        return context_of(turn, turn.driver or own, lifecycle)

    @contextmanager
    def _at_work(self, turn: DeliveryTurn, link: Any) -> Iterator[None]:
        """For a block that runs what stands behind the claim, with that connection: its error is
        noted.
        """
        turn.link = link
        turn.runs()
        try:
            yield
        except BaseException as error:
            turn.raised(error)
            if turn.context is not None:
                turn.context.check_awaited(error)
            raise

    def _kept(self, turn: DeliveryTurn, result: Any) -> Any:
        """The result of a handler; the turn has what the ledger keeps of it."""
        if turn.context is not None:
            turn.context.check_awaited()
        if self._settings.lifecycle is not None:
            turn.returned(self._settings.lifecycle.kept(turn, result))
        return result


class Runner(_AnyRunner):
    """Runs turns one after another, for handlers and middleware that are not async."""

    def __init__(self, settings: ConsumerSettings) -> None:
        super().__init__(settings)
        self._inner = chained(settings.inner, self._handle)
        self._outer = chained(settings.outer, self._barrier)

    def run_together(self, turns: Sequence[DeliveryTurn]) -> None:
        """Run these turns in one transaction. If all succeed, it is stored; else the turns are as
        before.
        """
        together = [turn for turn in turns if turn.key is not None]

        def run_all(link: Any, driver: Driver) -> bool:
            for turn in together:
                turn.link, turn.driver = link, driver
            return self.run_all(together)

        if len(together) > 1:
            run_together(self._settings.joined, self._settings.begins, together, run_all)

    def run_all(self, turns: Sequence[DeliveryTurn]) -> bool:
        """Run these turns of one transaction until one fails; return whether none has failed."""
        for turn in turns:
            # What one handler sets in its context is not there for the next.
            copy_context().run(self.run, turn)
            if turn.error is not None:
                return False
        return True

    def run(self, turn: DeliveryTurn) -> None:
        """Run it; what is raised is kept with it."""
        with self._running(turn):
            self._outer(turn.message)

    def _barrier(self, message: Message) -> Any:
        turn, settings = self._entered(message), self._settings
        if turn.is_duplicate:
            return settings.joined.given_back(turn)
        if settings.begins is not None and turn.link is None:
            # Its claim is made in the transaction of its handler, or was made before.
            return run(
                settings.joined, settings.begins, turn, lambda link: self._work(turn, message, link)
            )
        with entered(self._context(turn)):
            return self._work(turn, message, turn.link)

    def _work(self, turn: DeliveryTurn, message: Message, link: Any) -> Any:
        with self._at_work(turn, link):
            return self._kept(turn, self._inner(message))

    def _handle(self, message: Message) -> Any:
        handler, arguments = _calling(message)
        return handler(*arguments)


class TogetherRunner(Runner):
    """As Runner, for handlers that take all messages of a transaction at once."""

    def run_all(self, turns: Sequence[DeliveryTurn]) -> bool:
        """Hand the granted turns to their handlers; return whether none fails."""
        granted = [turn for turn in turns if turn.claim is not None]
        by_handler: dict[Any, list[DeliveryTurn]] = defaultdict(list)
        for turn in granted:
            by_handler[turn.handler].append(turn)
            turn.called()
        began = time.perf_counter()
        try:
            for handler, those in by_handler.items():
                ended(handler, [turn.message for turn in those], those[0].link)
        except BaseException as error:  # noqa: BLE001 - each message is tried alone then.
            if leaves_doubt(self._settings.policy, error):
                for turn in those:  # It may have had its effect for any of them.
                    turn.raised(error)
            _log.info(
                "a handler of several messages failed: %(reason)s; each message is tried alone",
                exc_info=True,
                extra={"event": "handler_of_many_failed", "count": len(granted)},
            )
            return False
        for turn in granted:
            turn.took_s = (time.perf_counter() - began) / len(granted)
        return True

    def _handle(self, message: Message) -> Any:
        handler, (_, link) = _calling(message)
        # As in a window: there is not one message that is being processed.
        with entered(None):
            return handler([message], link)


def check_together(settings: ConsumerSettings) -> None:
    """Raise ConfigError if handlers cannot take all messages of a transaction at once."""
    if settings.are_async:
        raise ConfigError("transactional: together is for handlers that are not async")
    if settings.outer or settings.inner:
        raise ConfigError(
            "transactional: a middleware stands around one message; leave out together=True"
        )
    if settings.lifecycle is not None and settings.lifecycle.keeps_result:
        raise ConfigError('transactional: together keeps no results; write Policy(results="off")')


class AsyncRunner(_AnyRunner):
    """As Runner, if some handlers or middleware are async, for the tasks of a loop."""

    def __init__(self, settings: ConsumerSettings) -> None:
        super().__init__(settings)
        self._threads = Threads()
        self._inner = chained_async(settings.inner, self._handle)
        self._outer = chained_async(settings.outer, self._barrier)

    async def run(self, turn: DeliveryTurn) -> None:
        """Run it; what is raised is kept with it."""
        with self._running(turn):
            await self._outer(turn.message)

    async def _barrier(self, message: Message) -> Any:
        turn, settings = self._entered(message), self._settings
        if turn.is_duplicate:
            return settings.joined.given_back(turn)
        if settings.begins is not None and turn.link is None:
            # Its claim is made in the transaction of its handler, or was made before.
            return await run_async(
                settings.joined, settings.begins, turn, lambda link: self._work(turn, message, link)
            )
        with entered(self._context(turn, is_async=True)):
            return await self._work(turn, message, turn.link)

    async def _work(self, turn: DeliveryTurn, message: Message, link: Any) -> Any:
        with self._at_work(turn, link):
            return self._kept(turn, await self._inner(message))

    async def _handle(self, message: Message) -> Any:
        handler, arguments = _calling(message)
        if is_async(handler):
            return await handler(*arguments)
        return await self._threads.run(ended, handler, *arguments)


def _raised(turn: DeliveryTurn, error: BaseException) -> None:
    if error is turn.error or error is turn.refusal:
        return
    has_run = turn.progress >= Progress.RUNNING
    if has_run or turn.refusal is not None or turn.is_duplicate:
        # The end of the message is known: a later error does not undo it.
        _log.error(
            "a middleware failed after message '%(message_id)s' had ended: %(reason)s; the end of "
            "the message stays",
            exc_info=error,
            extra={"event": "middleware_failed", "message_id": turn.message.id},
        )
    else:
        turn.raised(error)


def _calling(message: Message) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The handler that is called now, and its arguments."""
    turn = current_turn.get()
    # In this order: who stops a turn first says so, and then looks whether its handler was called.
    turn.called()
    if turn.state >= TurnState.ENDED:
        raise asyncio.CancelledError
    handler: Any = turn.handler
    return handler, (message,) if turn.link is None else (message, turn.link)
