"""The layer between pika and the socket: whole frames, large reads, and undecoded properties."""

import socket
import struct
from collections.abc import Callable
from ssl import SSLContext
from typing import NamedTuple

from pika import frame, spec
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.nbio_interface import (
    AbstractIOReference,
    AbstractStreamProtocol,
    AbstractStreamTransport,
)
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter

_RECEIVE_BYTES = 1 << 16
_FRAME = struct.Struct(">BHL")
_DELIVER = struct.pack(">L", spec.Basic.Deliver.INDEX)
_METHOD_BYTES = len(_DELIVER)
_DELIVERED = struct.Struct(">QB")
_SIZE = struct.Struct(">Q")
_SIZE_AT = 4
_CONTENT_BYTES = _SIZE_AT + _SIZE.size
"""The start of a header frame: class, weight and size of the body, before the properties."""
_NO_PROPERTIES = b"\0\0" + bytes([spec.FRAME_END])
_HEARTBEAT = frame.Heartbeat().marshal()

Linked = tuple[AbstractStreamTransport, AbstractStreamProtocol] | BaseException


class Sent(NamedTuple):
    """A message that the broker has delivered to a consumer."""

    number: int
    redelivered: bool
    properties: bytes
    """The encoded properties."""
    body: bytes


class AmqpWire(SelectorIOServicesAdapter):
    """The input and output of a pika connection.

    Pika reads 4 KB at a time, copies the rest after each frame, and takes more time for a delivery
    than all other code together. It ends the connection if it cannot read a message's properties.
    So pika gets single frames, without deliveries, which go to `receivers`, and without properties.
    """

    def __init__(self) -> None:
        self.loop = IOLoop()
        super().__init__(self.loop)  # type: ignore[arg-type] # The stubs know fewer loops.
        self.receivers: dict[int, Callable[[Sent], None]] = {}
        """The receivers of deliveries, by channel."""
        self.properties: dict[int, bytes] = {}
        """The properties of the message that pika has for a channel, by channel."""
        self.stream: AbstractStreamTransport | None = None
        """The connection; None before it is open."""

    @property
    def is_written(self) -> bool:
        """Whether all output was written to the socket."""
        return self.stream is None or not self.stream.get_write_buffer_size()

    def create_streaming_connection(
        self,
        protocol_factory: Callable[[], AbstractStreamProtocol],
        sock: socket.socket,
        on_done: Callable[[Linked], None],
        ssl_context: SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> AbstractIOReference:
        """Called by pika when it has connected."""

        def linked(result: Linked) -> None:
            if isinstance(result, tuple) and isinstance(protocol := result[1], _FrameReader):
                # Pika uses more of its own protocol than the interface has.
                result = (result[0], protocol.inner)
            on_done(result)

        ours = _Socket(fileno=sock.detach())
        # A new object knows nothing of the descriptor: TLS, put around it, would make it block.
        ours.settimeout(0.0)
        return super().create_streaming_connection(
            lambda: _FrameReader(protocol_factory(), self),
            ours,
            linked,
            ssl_context,
            server_hostname,
        )


class _Socket(socket.socket):
    """Reads much at a time: each read releases the GIL, which other threads then hold."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(max(size, _RECEIVE_BYTES), flags)


class _Content:
    """A message that has not arrived completely."""

    def __init__(self, method: bytes) -> None:
        at = _METHOD_BYTES + 1 + method[_METHOD_BYTES]
        self._number, self._redelivered = _DELIVERED.unpack_from(method, at)
        self._properties = b""
        self._left = 0
        self._parts: list[bytes] = []

    def header(self, size: int, properties: bytes) -> None:
        self._left, self._properties = size, properties

    def part(self, data: bytes) -> None:
        self._left -= len(data)
        self._parts.append(data)

    def whole(self) -> Sent | None:
        """The message; None if parts of it are missing."""
        if self._left:
            return None
        body = b"".join(self._parts)
        redelivered = bool(self._redelivered)
        return Sent(self._number, redelivered, self._properties, body)


class _FrameReader(AbstractStreamProtocol):
    """Passes input to pika's own protocol, except deliveries to consumers."""

    def __init__(self, inner: AbstractStreamProtocol, wire: AmqpWire) -> None:
        self.inner = inner
        self._wire = wire
        self._rest = b""
        """The first bytes of an incomplete frame."""
        self._contents: dict[int, _Content] = {}
        """The incomplete deliveries, by channel."""
        self._has_delivered = False

    def connection_made(self, transport: AbstractStreamTransport) -> None:
        self._wire.stream = transport
        self.inner.connection_made(transport)

    def connection_lost(self, error: BaseException | None) -> None:
        self.inner.connection_lost(error)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        if data.startswith(b"AMQP"):
            self.inner.data_received(data)
            return  # Not a frame: the broker speaks another version.
        start, size = 0, len(data)
        while size - start >= _FRAME.size:
            kind, channel, length = _FRAME.unpack_from(data, start)
            first = start + _FRAME.size
            end = first + length + spec.FRAME_END_SIZE
            if end > size:
                break
            if not self._is_delivered(kind, channel, data[first : end - spec.FRAME_END_SIZE]):
                shown = data[start:end]
                if kind == spec.FRAME_HEADER:
                    # Without its properties.
                    body, last = first + _CONTENT_BYTES, end - spec.FRAME_END_SIZE
                    self._wire.properties[channel] = data[body:last]
                    head = _FRAME.pack(spec.FRAME_HEADER, channel, _CONTENT_BYTES + 2)
                    shown = head + data[first:body] + _NO_PROPERTIES
                self.inner.data_received(shown)
            start = end
        self._rest = data[start:]
        if self._has_delivered:
            # Pika does not count frames that it does not see: it would take the broker for dead.
            self.inner.data_received(_HEARTBEAT)
            self._has_delivered = False

    def _is_delivered(self, kind: int, channel: int, data: bytes) -> bool:
        """Whether a frame is part of a delivery; the last part hands the delivery over."""
        if kind == spec.FRAME_METHOD:
            if data.startswith(_DELIVER) and channel in self._wire.receivers:
                self._contents[channel] = _Content(data)
                return True
            return False
        content = self._contents.get(channel)
        if content is None:
            return False
        if kind == spec.FRAME_HEADER:
            [size] = _SIZE.unpack_from(data, _SIZE_AT)
            content.header(size, data[_CONTENT_BYTES:])
        else:
            content.part(data)
        if sent := content.whole():
            del self._contents[channel]
            self._has_delivered = True
            # The broker requeues what arrives for a consumer that is gone.
            if receive := self._wire.receivers.get(channel):
                receive(sent)
        return True
