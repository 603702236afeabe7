"""Consumer: handles the messages of a queue, each once, with as little code as can be."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, overload

from oncely._util.event_log import EventLog
from oncely._util.garbage import rarely_collecting
from oncely._util.signals import StopEvent, end_at_once, on_signals
from oncely.consumer.health import Pulse
from oncely.consumer.loop import run
from oncely.consumer.report import ConsumerReport
from oncely.consumer.routes import Handler, check_pattern
from oncely.consumer.runner import check_together
from oncely.consumer.settings import ConsumerSettings, Listener, MetadataOf
from oncely.core.destination import check_destination
from oncely.core.durations import Duration, seconds
from oncely.core.errors import ConfigError, MessageError
from oncely.core.policy import Policy
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.retry_queue import RetryQueue
from oncely.lifecycle.transacting import AsyncTransactionSource, TransactionSource
from oncely.lifecycle.wrapping import check_called, check_takes
from oncely.middleware.chain import Middleware, check
from oncely.once import check_transaction
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import LagReporter, Transport

_log = EventLog(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_MOST = 10_000


class Consumer:
    """A queue and the handlers of its messages; nothing is opened before `consume`.

    `transport` is the URL of a broker, or a transport that is open. Each method but `handler`,
    `consume` and `stop` sets one thing more and returns the consumer. All raise ConfigError, which
    says what to write instead, for settings that make no sense.
    """

    def __init__(self, transport: str | Transport, queue: str) -> None:
        if not isinstance(queue, str) or not queue:
            raise ConfigError(f'queue: {queue!r} is not a name; write queue="notifications"')
        self.queue = queue
        self.url = transport if isinstance(transport, str) else None
        """The URL of the broker; None where a transport was handed over."""
        self._transport = None if isinstance(transport, str) else transport
        self._settings = ConsumerSettings(name=queue, queue=queue)
        self._ledger: Ledger | None = None
        self._changes: dict[str, Any] = {}
        """Changes of the policy."""
        self._error_queue: str | None = None
        self._stop = StopEvent()
        self.pulse = Pulse()
        """Tells whether `consume` is alive, for health checks."""

    @property
    def grace_s(self) -> float:
        """How many seconds running handlers have to end when it is stopped."""
        return self._settings.grace_s

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of `idempotent`; None without it."""
        return self._ledger

    # ---- What it takes -------------------------------------------------------------------------

    def events(self, *types: str) -> Self:
        """Take messages of these types; where the broker has an exchange, the queue is bound to
        them. `on_unknown_type` of the policy decides about any other message that comes. `*` stands
        for a word between dots, `#` for any number of words.
        """
        self._settings.routes.events += map(check_pattern, types)
        return self

    @overload
    def handler(self, function: F, /) -> F: ...
    @overload
    def handler(self, *types: str) -> Callable[[F], F]: ...
    def handler(self, *types: Any) -> Any:
        """Decorate the function that takes messages: those of `types`, or all that no other takes.

        It is called with the message, and in a transactional consumer with a connection or session
        besides. It may be async.
        """
        if len(types) == 1 and callable(types[0]):
            self._settings.routes.add(types[0])
            return types[0]
        for each in types:
            check_pattern(each)

        def registered(function: F) -> F:
            self._settings.routes.add(function, types)
            return function

        return registered

    # ---- How it is handled ---------------------------------------------------------------------

    def middleware(self, *middlewares: Middleware) -> Self:
        """Put these around the handler: `fn(message, call_next)`, the first outermost.

        Duplicates go through the middleware before `idempotent`, and through none after it.
        """
        settings = self._settings
        (settings.outer if self._ledger is None else settings.inner).extend(middlewares)
        return self

    def idempotent(
        self,
        ledger: Ledger,
        name: str,
        metadata: Mapping[str, Any] | MetadataOf | None = None,
        policy: Policy = Policy(),
    ) -> Self:
        """Handle each message once: `ledger` remembers it for the consumer of that `name`.

        `metadata` is kept with the record; it may be a function of the message.
        """
        if self._ledger is not None:
            raise ConfigError("idempotent: this consumer has a ledger already; call it once")
        Lifecycle.under(ledger, name, policy)
        self._ledger, self._settings.name, self._settings.policy = ledger, name, policy
        self._settings.metadata_of = _metadata_of(metadata)
        return self

    def transactional(
        self, source: TransactionSource | AsyncTransactionSource, *, together: bool = False
    ) -> Self:
        """Give the handler a connection of this Engine or session factory, to the ledger's own
        database: its writes there are committed with its claim, or rolled back with it.

        The messages of a window have one transaction where all succeed, else each has its own,
        for which its handler is called again. A handler that takes them `together` is called with
        a list of all that are new in a window, or with a list of one; it cannot be async, sends
        nothing and keeps no steps or results, and there is no middleware around it.
        """
        if not callable(getattr(source, "begin", None)):
            raise ConfigError(
                f"transactional: {type(source).__name__} is not an engine; "
                "hand over a SQLAlchemy Engine or sessionmaker"
            )
        self._settings.begins, self._settings.is_together = source, together
        # Without the ledger's database there is no transaction either.
        self._change(on_outage="pause")
        return self

    def tries(self, tries: int) -> Self:
        """Give a message up after so many attempts."""
        self._change(tries=tries)
        return self

    def backoff(self, delays: Duration | Sequence[Duration]) -> Self:
        """Wait so long before a retry; the last of several delays repeats."""
        self._change(backoff=delays)
        return self

    def catch(self, listener: Listener) -> Self:
        """Call `listener(error, message)` after each failure that will be retried."""
        self._settings.on_retry.append(check_called(listener, "catch", ["error", "message"]))
        return self

    def failed(self, listener: Listener) -> Self:
        """Call `listener(error, message)` when a message is given up, before it goes to the dead
        letters. Once, unless the process dies at that moment.
        """
        self._settings.on_failed.append(check_called(listener, "failed", ["error", "message"]))
        return self

    def error_queue(self, name: str) -> Self:
        """Send a copy of each message that is given up to this destination; the ledger has the dead
        letter.

        For a consumer whose ledger has transactions.
        """
        try:
            self._error_queue = check_destination(name)
        except MessageError as error:
            raise ConfigError(f"error_queue: {error}") from None
        return self

    def _change(self, **changes: Any) -> None:
        replace(self._settings.policy, **changes)
        self._changes |= changes

    # ---- How fast ------------------------------------------------------------------------------

    def concurrency(self, count: int) -> Self:
        """Let so many handlers run at a time: threads or, where they are async, tasks."""
        self._settings.concurrency = _count(count, "concurrency")
        return self

    def window(self, most: int) -> Self:
        """Claim and complete at most so many messages together: fewer, where they take long."""
        self._settings.window = _count(most, "window")
        return self

    def ordered(self) -> Self:
        """Handle messages of the same key one after another, in their order; one that waits for its
        retry holds up those behind it. Within one process: run only one, where that matters.
        """
        self._settings.is_ordered = True
        return self

    def grace(self, grace: Duration) -> Self:
        """When it is stopped, give running handlers so long to end."""
        self._settings.grace_s = seconds(grace, "grace")
        return self

    # ---- Elsewhere -----------------------------------------------------------------------------

    def redirect(self, *, ledger: Ledger | None = None, transport: Transport | None = None) -> Self:
        """Use these, where they are given, in place of the ledger and transport that were named: in
        another environment, say. They stay open.

        A ledger is refused where there is none to replace, and in a transactional consumer, whose
        records are where its transactions are.
        """
        if ledger is not None:
            if self._ledger is None:
                raise ConfigError("ledger: there is none to replace; add .idempotent(ledger, name)")
            if self._settings.begins is not None:
                raise ConfigError(
                    "ledger: a transactional consumer keeps its records where its transactions "
                    "are; let its module name another database for both"
                )
            self._ledger = ledger
        if transport is not None:
            self.url, self._transport = None, transport
        return self

    # ---- At work -------------------------------------------------------------------------------

    def consume(
        self,
        handler: Handler | None = None,
        *,
        drain: bool = False,
        stop_on_signals: bool = False,
        on_progress: Callable[[ConsumerReport], None] = lambda _: None,
    ) -> ConsumerReport:
        """Handle messages until it is stopped, or, to `drain`, until no message is waiting, delayed
        or in flight. Return what it has done.

        `handler` takes the messages that no decorated handler takes. `on_progress` is called now
        and then. With `stop_on_signals` SIGTERM and SIGINT stop it, and a second one ends the
        process at once. Raises TransportError where the broker cannot be reached at the start,
        StoreError where the ledger has no table.
        """
        settings = self._for_a_run(handler)
        try:
            signals = on_signals(self._stop.set, end_at_once) if stop_on_signals else nullcontext()
            given = self._transport
            opened = (
                closing(open_transport(self.url or "")) if given is None else nullcontext(given)
            )
            with opened as transport, signals, ExitStack() as told:
                # The loop asks on every turn.
                self._stop.on_asked = self.pulse.beat
                topics = settings.routes.topics
                transport.subscribe(self.queue, topics, alone=settings.is_ordered)
                if self._ledger is not None:
                    self._ledger.recorder.works_as("consumer", settings.name)
                    if isinstance(transport, LagReporter):
                        lags = partial(transport.lags, self.queue)
                        told.enter_context(self._ledger.recorder.telling_lags(lags))
                with rarely_collecting():
                    return run(
                        settings, transport, self._stop, on_progress, self.pulse, drains=drain
                    )
        finally:
            self._stop.clear()

    def stop(self) -> None:
        """Take no more messages, and let `consume` return, or the next call of it where none runs.
        From any thread, or a signal handler.
        """
        self._stop.set()

    def _for_a_run(self, handler: Handler | None) -> ConsumerSettings:
        settings = replace(
            self._settings,
            routes=self._settings.routes.with_rest(handler),
            policy=replace(self._settings.policy, **self._changes),
        )
        if not settings.routes.all:
            raise ConfigError("consume: nothing handles the messages; write consume(handler)")
        if self._ledger is None:
            _log.warning(
                "queue '%(queue)s' is consumed without a ledger: nothing keeps a message that is "
                "delivered twice from being handled twice; add .idempotent(ledger, name)",
                extra={"event": "no_ledger", "queue": self.queue},
            )
        else:
            settings.lifecycle = Lifecycle.under(self._ledger, settings.name, settings.policy)
            if self._ledger.can_defer:
                settings.lifecycle.retry_queue = RetryQueue(
                    settings.name, settings.is_ordered, self._error_queue
                )
        self._check(settings)
        return settings

    def _check(self, settings: ConsumerSettings) -> None:
        """Raise ConfigError where the settings do not go together."""
        if settings.begins is not None and self._ledger is None:
            raise ConfigError("transactional: no ledger is known; add .idempotent(ledger, name)")
        names = ["messages" if settings.is_together else "message"]
        names += [] if settings.begins is None else ["connection"]
        for handler in settings.routes.all:
            check_takes(handler, "handler", names)
            if settings.lifecycle is not None:
                settings.lifecycle.serializer_of(handler)
            # The chain is made around all handlers together, and cannot check each.
            for middleware in (*settings.outer, *settings.inner):
                check(middleware, handler)
        if self._error_queue is not None and (self._ledger is None or not self._ledger.can_defer):
            raise ConfigError(
                "error_queue: its messages are sent through the ledger, which has to be in a "
                'database; add .idempotent(open_ledger("postgresql://..."), name)'
            )
        if settings.begins is None or self._ledger is None:
            return
        if settings.are_async and not settings.routes.are_async:
            raise ConfigError(
                "transactional: a middleware is async, and the handlers are not; write both as "
                "`async def`, with an AsyncEngine"
            )
        if settings.is_together:
            check_together(settings)
        for handler in settings.routes.all:
            check_transaction(settings.begins, handler, self._ledger)


def _metadata_of(metadata: Mapping[str, Any] | MetadataOf | None) -> MetadataOf | None:
    if metadata is None:
        return None
    if callable(metadata):
        return check_called(metadata, "metadata", ["message"])
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata: {metadata!r} is neither a dict nor a function of the message")
    given = dict(metadata)
    return lambda _: given


def _count(value: int, what: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise ConfigError(f"{what}: {value!r} is not a whole number from 1 to {_MOST:,}")
    return value
