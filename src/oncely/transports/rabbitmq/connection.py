"""Connections to a RabbitMQ broker: each with a thread of its own, so that nobody's work starves
its heartbeats.
"""

import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from random import uniform
from typing import Any, TypeVar

from pika import BasicProperties, SelectConnection, exceptions, frame, spec
from pika.adapters.select_connection import IOLoop
from pika.connection import Parameters

from oncely.core.errors import BrokerRefused, TransportError, describe

T = TypeVar("T")
Reply = Callable[[Any], None]

ANSWER_S = 30.0
"""How long a broker may take to answer what it answers at once when it is well."""
_CLOSE_S = 5.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_RECEIVE_BYTES = 1 << 16
_FRAME = struct.Struct(">BHL")
_AROUND_BYTES = _FRAME.size + spec.FRAME_END_SIZE
_CONTENT = struct.Struct(">HHQ")


Lost = TransportError | BrokerRefused
"""Why a line is of no use any more."""


class ChannelLost(TransportError):
    """A channel was closed by the broker; `code` says why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ: {text}")
        self.code = code
        self.text = text


class _Connection(SelectConnection):
    """Pika's, but that one message with broken properties does not end it, time and again, and
    that it receives much at a time.
    """

    _received = b""
    """Of a frame that is not whole yet."""

    @property
    def is_written(self) -> bool:
        """Whether the socket has taken all that was to be sent."""
        return not self._get_write_buffer_size()  # type: ignore[attr-defined]

    def abort(self, error: Exception) -> None:
        """End it without a word to the broker, who may not be listening."""
        self._terminate_stream(error)  # type: ignore[attr-defined]

    def _proto_connection_made(self, transport: Any) -> None:
        # Each receiving lets go of the interpreter, and those who work would let it wait for long.
        transport._MAX_RECV_BYTES = _RECEIVE_BYTES
        super()._proto_connection_made(transport)  # type: ignore[misc]

    def _on_data_available(self, data_in: bytes) -> None:
        """Frame by frame: pika copies all that is left after each."""
        data = self._received + data_in
        if data.startswith(b"AMQP"):
            super()._on_data_available(data)  # type: ignore[misc]
            return  # No frame: the broker speaks another version.
        start, size = 0, len(data)
        while size - start >= _FRAME.size:
            end = start + _FRAME.unpack_from(data, start)[2] + _AROUND_BYTES
            if end > size:
                break
            self._process_frame(_decoded(data[start:end]))  # type: ignore[attr-defined]
            start = end
        self._received = data[start:]
        self.bytes_received += start  # type: ignore[attr-defined] # What heartbeats go by.


def _decoded(data: bytes) -> Any:
    try:
        return frame.decode_frame(data)[1]
    except Exception:
        kind, channel, _ = _FRAME.unpack_from(data)
        if kind != spec.FRAME_HEADER:
            raise
        _, _, body_size = _CONTENT.unpack_from(data, _FRAME.size)
        return frame.Header(channel, body_size, BasicProperties())


class Line:
    """A connection and the thread that serves it. Once it is lost it stays lost.

    Raises TransportError when it cannot be opened; BrokerRefused where to try again is no use.
    """

    def __init__(self, parameters: Parameters, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._error: Lost | None = None
        self._asked: set[Future[Any]] = set()
        self._ioloop = IOLoop()
        self._opened: Future[None] = Future()
        self._asked.add(self._opened)
        self._parameters = parameters
        self._thread = threading.Thread(target=self._serve, name="oncely-rabbitmq", daemon=True)
        self._thread.start()
        self._answer(self._opened)

    @property
    def is_open(self) -> bool:
        """Whether it is not lost, as far as anybody knows."""
        return self._error is None

    def ask(self, start: Callable[["Future[T]"], object]) -> T:
        """Run `start` on the thread, and wait for the result that it, or what it starts, sets.

        Raises TransportError when none comes in time, and the line is lost then.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._asked.add(future)
            self._ioloop.add_callback_threadsafe(lambda: _begin(start, future))
        return self._answer(future)

    def open_channel(self, reply: Reply) -> Any:
        """On the thread: open a channel."""
        return self._connection.channel(on_open_callback=reply)

    def when_written(self, call: Callable[[], object]) -> None:
        """On the thread: call it as soon as all that was said before is with the system."""
        self._ioloop.add_callback(lambda: self._call_or_wait(call))

    def call_later(self, delay_s: float, call: Callable[[], object]) -> None:
        """On the thread: call it after that time."""
        self._ioloop.call_later(delay_s, call)

    def close(self) -> None:
        """Leave the broker, who gives back what is not settled."""
        with self._lock:
            if self._error is None:
                self._ioloop.add_callback_threadsafe(self._leave)
        self._thread.join(_CLOSE_S)
        self._end(TransportError("RabbitMQ: the connection was closed"))

    def _serve(self) -> None:
        error: Exception | None = None
        try:
            self._connection = _Connection(
                self._parameters,
                on_open_callback=lambda _: self._opened.set_result(None),
                on_open_error_callback=lambda _, error: self._over(error),
                on_close_callback=lambda _, error: self._over(error),
                custom_ioloop=self._ioloop,
            )
            self._ioloop.start()
        except Exception as raised:  # noqa: BLE001 - whatever it is, those who wait are told.
            error = raised
        self._over(error or TransportError("RabbitMQ: the connection has ended"))
        with self._lock:
            self._ioloop.close()

    def _over(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error_of(error)
            asked, self._asked = self._asked, set()
        self._ioloop.stop()
        for future in asked:
            _fail(future, self._error)

    def _end(self, error: Lost) -> None:
        """Make it lost, from any thread."""
        with self._lock:
            if self._error is None:
                self._ioloop.add_callback_threadsafe(lambda: self._connection.abort(error))
        self._thread.join(_CLOSE_S)

    def _leave(self) -> None:
        # One that is being closed, or is lost, is not to be closed again.
        with suppress(exceptions.ConnectionWrongStateError):
            self._connection.close()

    def _answer(self, future: "Future[T]") -> T:
        try:
            return future.result(self._answer_s)
        except TimeoutError:
            error = TransportError(f"RabbitMQ has not answered within {self._answer_s:g} s")
            self._end(error)
            raise error from None
        finally:
            self._asked.discard(future)

    def _call_or_wait(self, call: Callable[[], object]) -> None:
        if self._connection.is_written:
            call()
        else:
            self.when_written(call)


class Channel:
    """A channel of a line, and what was asked on it. One that the broker has closed stays so."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.error: Lost | None = None
        self._asked: set[Future[Any]] = set()
        self.raw: Any = line.ask(self._open)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.error is not None or not self.line.is_open

    def ask(self, start: Callable[[Reply], object]) -> Any:
        """Run `start` on the thread; return what it, or pika later, hands to the reply.

        Raises ChannelLost when the broker closes the channel instead.
        """

        def begin(future: "Future[Any]") -> None:
            if self.error is not None:
                raise self.error
            self._asked.add(future)
            future.add_done_callback(self._asked.discard)
            start(lambda answer: succeed(future, answer))

        return self.line.ask(begin)

    def close(self) -> None:
        """Give back what is not settled on it."""
        with suppress(TransportError, BrokerRefused):
            # The answer is that it is lost.
            self.ask(lambda _: self.raw.close())

    def lost(self) -> None:
        """On the thread: it was closed, for the reason in `error`."""

    def _open(self, future: "Future[Any]") -> None:
        self._asked.add(future)
        raw = self.line.open_channel(lambda opened: succeed(future, opened))
        raw.add_on_close_callback(self._on_close)

    def _on_close(self, _: object, reason: BaseException) -> None:
        self.error = error_of(reason)
        for future in list(self._asked):
            _fail(future, self.error)
        self.lost()


class Reach:
    """The way to the broker: a line, and another one when that is lost, with pauses that grow."""

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
        """A line that is open; tries again until that moment. Raises as Line does."""
        with self._lock:
            while True:
                if self._line is not None and self._line.is_open:
                    return self._line
                self._pause(until)
                try:
                    self._line = Line(self._parameters, self._answer_s)
                    self._failures = 0
                except TransportError as error:
                    self._failed(error)
                except BrokerRefused as error:
                    self._failed(error)
                    raise

    def close(self) -> None:
        """Close the line; there is no other after it."""
        self._closed.set()
        with self._lock:
            if self._line is not None:
                self._line.close()

    def _pause(self, until: float) -> None:
        """Wait until one may try again; raise where that would be too late."""
        now = time.monotonic()
        last = max(now, until)
        if self._closed.wait(max(0.0, min(self._not_before, last) - now)):
            raise TransportError("RabbitMQ: the transport was closed meanwhile")
        if self._not_before > last:
            raise self._error

    def _failed(self, error: Lost) -> None:
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._failures)
        self._failures += 1
        self._not_before = time.monotonic() + uniform(pause_s / 2, pause_s)  # noqa: S311 - spreads, hides nothing.
        self._error = error


def error_of(reason: BaseException) -> Lost:
    """What to tell of an error of pika's."""
    match reason:
        case TransportError() | BrokerRefused():
            return reason
        case exceptions.ChannelClosed():
            return ChannelLost(reason.reply_code, reason.reply_text)
        case exceptions.ProbableAuthenticationError() if _is_brokers_word(reason):
            return BrokerRefused("RabbitMQ: wrong user or password in the URL")
        case exceptions.ProbableAccessDeniedError() if _is_brokers_word(reason):
            return BrokerRefused(f"RabbitMQ: no access to the vhost in the URL: {reason!s:.200}")
    return TransportError(f"RabbitMQ: {describe(_innermost(reason), 300)}")


def _is_brokers_word(error: BaseException) -> bool:
    """Whether the broker has said so. Pika only guesses where a connection broke."""
    return exceptions.ConnectionClosedByBroker.__name__ in f"{error!r}"


def _innermost(error: BaseException) -> BaseException:
    """What pika has wrapped, often more than once."""
    inner = getattr(error, "exceptions", None) or getattr(error, "exception", None)
    if not inner and error.args and isinstance(error.args[0], BaseException):
        inner = error.args[0]
    if not inner:
        return error
    return _innermost(inner[-1] if isinstance(inner, list | tuple) else inner)


def _begin(start: Callable[["Future[T]"], object], future: "Future[T]") -> None:
    try:
        start(future)
    except Exception as error:  # noqa: BLE001 - it is raised where it was asked.
        _fail(future, error_of(error))


def succeed(future: "Future[Any]", answer: object) -> None:
    """Answer, unless somebody has."""
    if not future.done():
        future.set_result(answer)


def _fail(future: "Future[Any]", error: Exception | None) -> None:
    if not future.done():
        future.set_exception(error)
