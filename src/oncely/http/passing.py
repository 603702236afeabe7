"""Responses that pass through: their request ends with their last chunk."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager

from oncely._util.event_log import EventLog

_log = EventLog(__name__)


def _nothing() -> None:
    pass


class Passing:
    """The chunks of a response, for a server to iterate and to close.

    After the last chunk `end` is called, and `stack`, which holds the request's work, is closed. A
    client that disconnects does not stop the application: the rest is read and dropped.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        end: Callable[[], None],
        stack: ExitStack,
        close: Callable[[], object] = _nothing,
    ) -> None:
        self._chunks = chunks
        self._end = end
        self._stack = stack
        self._close = close

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._chunks)
        except StopIteration:
            end, self._end = self._end, _nothing
            with logged(), self._stack.pop_all():
                end()
            raise
        except BaseException as error:
            self._end = _nothing
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise

    def close(self) -> None:
        """Called by the server at the end of the response."""
        try:
            for _ in self:
                pass
        finally:
            self._close()


async def passing(
    chunks: AsyncIterator[bytes], end: Callable[[], None], stack: AsyncExitStack
) -> AsyncIterator[bytes]:
    """As Passing, for async chunks."""
    async with stack:
        async for chunk in chunks:
            yield chunk
        ended = stack.pop_all()
    with logged():
        async with ended:
            end()


@contextmanager
def logged() -> Iterator[None]:
    """Log an error in the block, and do not raise it: the client has its response already."""
    try:
        yield
    except Exception:  # noqa: BLE001 - as said.
        _log.warning(
            "the end of a request could not be stored: %(reason)s; its response has been sent",
            exc_info=True,
            extra={"event": "request_not_completed"},
        )
