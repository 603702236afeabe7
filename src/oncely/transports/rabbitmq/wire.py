"""Between pika and the socket: whole frames, much at a time, and properties as they came."""

import socket
import struct
from collections.abc import Callable
from ssl import SSLContext
from typing import Any

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
_CONTENT_BYTES = 12
"""Of a header frame: class, weight and size of the body, before the properties."""
_BARE_HEADER_BYTES = _CONTENT_BYTES + 2
_NO_PROPERTIES = b"\0\0" + bytes([spec.FRAME_END])

Linked = tuple[AbstractStreamTransport, AbstractStreamProtocol] | BaseException


class Wire(SelectorIOServicesAdapter):
    """What a connection of pika's does its input and output through.

    Pika receives 4 KB at a time, copies all that is left after each frame, and ends the connection
    for one message whose properties it cannot read. So it is given frame by frame, and headers
    without their properties: those of the message that it has for a channel are in `properties`.
    """

    def __init__(self) -> None:
        self.loop = IOLoop()
        super().__init__(self.loop)  # type: ignore[arg-type] # The stubs know fewer loops.
        self.properties: dict[int, bytes] = {}
        """By channel."""
        self.stream: AbstractStreamTransport | None = None
        """None before there is a connection."""

    @property
    def is_written(self) -> bool:
        """Whether the socket has taken all that was to be sent."""
        return self.stream is None or not self.stream.get_write_buffer_size()

    def say(self, channel: int, method: Any) -> None:
        """Tell the broker something of which pika is to know nothing."""
        if self.stream is not None:
            self.stream.write(frame.Method(channel, method).marshal())

    def create_streaming_connection(
        self,
        protocol_factory: Callable[[], AbstractStreamProtocol],
        sock: socket.socket,
        on_done: Callable[[Linked], None],
        ssl_context: SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> AbstractIOReference:
        """Pika asks for this when it has connected."""

        def linked(result: Linked) -> None:
            if isinstance(result, tuple) and isinstance(protocol := result[1], _Framing):
                # It asks its own protocol for more than its interface has.
                result = (result[0], protocol.inner)
            on_done(result)

        return super().create_streaming_connection(
            lambda: _Framing(protocol_factory(), self),
            _Socket(fileno=sock.detach()),
            linked,
            ssl_context,
            server_hostname,
        )


class _Socket(socket.socket):
    """Receives much at a time: each time lets go of the interpreter, which others then keep."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(max(size, _RECEIVE_BYTES), flags)


class _Framing(AbstractStreamProtocol):
    """Hands what arrives to pika's own protocol."""

    def __init__(self, inner: AbstractStreamProtocol, wire: Wire) -> None:
        self.inner = inner
        self._wire = wire
        self._rest = b""
        """Of a frame that is not whole yet."""

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
            return  # No frame: the broker speaks another version.
        start, size = 0, len(data)
        while size - start >= _FRAME.size:
            kind, channel, length = _FRAME.unpack_from(data, start)
            end = start + _FRAME.size + length + spec.FRAME_END_SIZE
            if end > size:
                break
            if kind == spec.FRAME_HEADER:
                inner = self._without_properties(data, start, end, channel)
            else:
                inner = data[start:end]
            self.inner.data_received(inner)
            start = end
        self._rest = data[start:]

    def _without_properties(self, data: bytes, start: int, end: int, channel: int) -> bytes:
        content = start + _FRAME.size
        first = content + _CONTENT_BYTES
        self._wire.properties[channel] = data[first : end - spec.FRAME_END_SIZE]
        head = _FRAME.pack(spec.FRAME_HEADER, channel, _BARE_HEADER_BYTES)
        return head + data[content:first] + _NO_PROPERTIES
