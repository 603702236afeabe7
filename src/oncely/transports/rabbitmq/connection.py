"""Connections to a RabbitMQ broker: each has its own thread, so that other work does not delay its
heartbeats.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from pika import SelectConnection, exceptions
from pika.connection import Parameters

from oncely._util.clock import monotonic
from oncely._util.pauses import pause_s
from oncely._util.tls import advice
from oncely.core.errors import BrokerRefused, TransportError, describe
from oncely.transports.rabbitmq.wire import AmqpWire

T = TypeVar("T")
Reply = Callable[[Any], None]

ANSWER_S = 30.0
"""How long a broker may take for an answer that a healthy broker gives at once."""
_CLOSE_S = 5.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0

Lost = TransportError | BrokerRefused
"""Why a connection is lost."""


class ChannelLost(TransportError):
    """A channel was closed by the broker; `code` says why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ: {text}")
        self.code = code
        self.text = text


class Line:
    """A connection and its thread. A lost connection stays lost."""

    def __init__(self, parameters: Parameters, answer_s: float = ANSWER_S) -> None:
        self.wire = AmqpWire()
        """Only the line's thread uses it."""
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._error: Lost | None = None
        self._blocked = threading.Event()
        """The broker has blocked the connection: it accepts no messages and reads nothing else."""
        self._asked: set[Future[Any]] = set()
        self._opened: Future[None] = Future()
        self._asked.add(self._opened)
        self._parameters = parameters
        self._thread = threading.Thread(target=self._serve, name="oncely-rabbitmq", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._error is None

    def wait_until_open(self) -> None:
        """Raises TransportError when it cannot be opened; BrokerRefused if it is useless to try
        again.
        """
        self._answer(self._opened)

    def ask(self, start: Callable[["Future[T]"], object]) -> T:
        """Run `start` on the thread, and wait for the result that it, or what it starts, sets.

        Raises TransportError when none comes in time, and the line is lost then.
        """
        future: Future[T] = Future()

        def begin() -> None:
            try:
                start(future)
            except Exception as error:  # noqa: BLE001 - it is raised in the caller of `ask`.
                _fail(future, error_of(error))

        with self._lock:
            if self._error is not None:
                raise self._error
            self._asked.add(future)
            self.wire.loop.add_callback_threadsafe(begin)
        return self._answer(future)

    def when_written(self, call: Callable[[], object]) -> None:
        """On the thread: call `call` as soon as all earlier output was written to the socket."""

        def call_or_wait() -> None:
            if self.wire.is_written:
                call()
            else:
                self.when_written(call)

        self.wire.loop.add_callback(call_or_wait)

    def close(self) -> None:
        """Close the connection; the broker requeues what is not acknowledged."""
        closed = TransportError("RabbitMQ: the connection was closed")
        with self._lock:
            is_heard = self._error is None and not self._blocked.is_set()
            if is_heard:
                self.wire.loop.add_callback_threadsafe(self._leave)
        if is_heard:
            self._thread.join(_CLOSE_S)
        self._end(closed)

    def _serve(self) -> None:
        error: Exception | None = None
        try:
            self.connection = SelectConnection(
                self._parameters,
                on_open_callback=lambda _: succeed(self._opened, None),
                on_open_error_callback=lambda _, error: self._over(error),
                on_close_callback=lambda _, error: self._over(error),
                custom_ioloop=self.wire,
            )
            self.connection.add_on_connection_blocked_callback(lambda *_: self._blocked.set())
            self.connection.add_on_connection_unblocked_callback(lambda *_: self._blocked.clear())
            self.wire.loop.start()
        except Exception as raised:  # noqa: BLE001 - the waiting threads get every error.
            error = raised
        self._over(error or TransportError("RabbitMQ: the connection has ended"))
        with self._lock:
            self.wire.loop.close()

    def _over(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error_of(error)
            asked, self._asked = self._asked, set()
        self.wire.loop.stop()
        for future in asked:
            _fail(future, self._error)

    def _end(self, error: Lost) -> None:
        """Drop the connection, from any thread, without closing it at the broker."""

        def abort() -> None:
            with self._lock:
                self._error = self._error or error
            if self.wire.stream is None:
                self._leave()
            else:
                self.wire.stream.abort()

        with self._lock:
            if self._error is None:
                self.wire.loop.add_callback_threadsafe(abort)
        self._thread.join(_CLOSE_S)

    def _leave(self) -> None:
        # A connection that is closing, or lost, must not be closed again.
        with suppress(exceptions.ConnectionWrongStateError):
            self.connection.close()

    def _answer(self, future: "Future[T]") -> T:
        try:
            return future.result(self._answer_s)
        except TimeoutError:
            error = TransportError(f"RabbitMQ has not answered within {self._answer_s:g} s")
            self._end(error)
            raise error from None
        finally:
            self._asked.discard(future)


class Channel:
    """A channel of a line, and its pending calls. A channel that the broker closed stays closed."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.error: Lost | None = None
        self._asked: set[Future[Any]] = set()
        self.raw: Any = None
        self.ask(self._open)

    @property
    def is_over(self) -> bool:
        """Whether the channel is closed."""
        return self.error is not None or not self.line.is_open

    def ask(self, start: Callable[[Reply], object]) -> Any:
        """Run `start` on the thread; return the value that it, or pika later, gives to the reply.

        Raises ChannelLost when the broker closes the channel instead.
        """

        def begin(future: "Future[Any]") -> None:
            if self.error is not None:
                raise self.error
            self._asked.add(future)
            future.add_done_callback(self._asked.discard)
            start(lambda answer: succeed(future, answer))

        return self.line.ask(begin)

    def call(self, method: Callable[..., object], *args: Any, **named: Any) -> Any:
        """Call this method of pika's channel; return the broker's answer. Raises as `ask` does."""
        return self.ask(lambda reply: method(*args, **named, callback=reply))

    def close(self) -> None:
        """Close the channel; the broker requeues what is not acknowledged on it."""
        with suppress(TransportError, BrokerRefused):
            # Answered by the loss of the channel.
            self.ask(lambda _: self.raw.close())

    def lost(self) -> None:
        """On the thread: the channel was closed, for the reason in `error`."""

    def _open(self, reply: Reply) -> None:
        self.raw = self.line.connection.channel(on_open_callback=reply)
        self.raw.add_on_close_callback(self._on_close)

    def _on_close(self, _: object, reason: BaseException) -> None:
        self.error = error_of(reason)
        for future in list(self._asked):
            _fail(future, self.error)
        self.lost()


class Reach:
    """Reconnects to the broker: opens a new line when one is lost, with growing pauses."""

    def __init__(self, parameters: Parameters, answer_s: float = ANSWER_S) -> None:
        self._parameters = parameters
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._failures = 0
        self._not_before = 0.0
        self._error: Lost = TransportError("RabbitMQ: not connected")
        self._closed = threading.Event()

    def line(self, until: float = 0.0) -> Line:
        """An open line; tries to connect until that moment. Raises as Line does."""
        with self._lock:
            while True:
                if self._line is not None and self._line.is_open:
                    return self._line
                # Wait until the next attempt, unless that is too late.
                now = monotonic()
                last = max(now, until)
                if self._closed.wait(max(0.0, min(self._not_before, last) - now)):
                    raise TransportError("RabbitMQ: the transport was closed while connecting")
                if self._not_before > last:
                    raise self._error
                try:
                    self._line = Line(self._parameters, self._answer_s)
                    self._line.wait_until_open()
                    self._failures = 0
                    if not self._closed.is_set():
                        return self._line
                    self._line.close()
                except (TransportError, BrokerRefused) as error:
                    rest_s = pause_s(self._failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                    self._failures += 1
                    self._not_before = monotonic() + rest_s
                    self._error = error
                    if isinstance(error, BrokerRefused):
                        raise

    def close(self) -> None:
        """Close the line, and open no other. Does not wait for a thread that is opening one."""
        self._closed.set()
        if (line := self._line) is not None:
            line.close()


def error_of(reason: BaseException) -> Lost:
    """The error to raise for an error of pika."""
    match reason:
        case TransportError() | BrokerRefused():
            return reason
        case exceptions.ChannelClosed():
            return ChannelLost(reason.reply_code, reason.reply_text)
        case exceptions.ProbableAuthenticationError() if _is_brokers_word(reason):
            return BrokerRefused("RabbitMQ: wrong user or password in the URL")
        case exceptions.ProbableAccessDeniedError() if _is_brokers_word(reason):
            return BrokerRefused(f"RabbitMQ: no access to the vhost in the URL: {reason!s:.200}")
    is_lost = isinstance(reason, exceptions.StreamLostError)  # It was open before.
    told = "" if is_lost else advice(repr(reason), "amqp")
    return TransportError(f"RabbitMQ: {describe(_innermost(reason), 300)}{told}")


def _is_brokers_word(error: BaseException) -> bool:
    """Whether the error came from the broker. If a connection broke, pika only guesses why."""
    return exceptions.ConnectionClosedByBroker.__name__ in f"{error!r}"


def _innermost(error: BaseException) -> BaseException:
    """The error that pika has wrapped, often more than once."""
    inner = getattr(error, "exceptions", None) or getattr(error, "exception", None)
    if not inner and error.args and isinstance(error.args[0], BaseException):
        inner = error.args[0]
    if not inner:
        return error
    return _innermost(inner[-1] if isinstance(inner, list | tuple) else inner)


def succeed(future: "Future[Any]", answer: object) -> None:
    """Set the result, unless the future has one."""
    if not future.done():
        future.set_result(answer)


def _fail(future: "Future[Any]", error: Exception | None) -> None:
    if not future.done():
        future.set_exception(error)
