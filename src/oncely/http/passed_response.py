"""Responses that pass through: their request ends with their last chunk."""

from collections.abc import AsyncIterator, Callable, Iterator

from oncely.http.request_state import RequestState
from oncely.ledger.driver import run_inline


class PassedResponse:
    """The chunks of a response, for a server to iterate and to close.

    A client that disconnects does not stop the application: the rest is read and dropped.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        state: RequestState,
        status: int,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._chunks = _ended(chunks, state, status)
        self._close = close

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        """Called by the server at the end of the response."""
        try:
            for _ in self._chunks:
                pass
        finally:
            self._close()


def _ended(chunks: Iterator[bytes], state: RequestState, status: int) -> Iterator[bytes]:
    try:
        yield from chunks
    except BaseException as error:
        run_inline(state.passed(status, error))
        raise
    run_inline(state.passed(status))


async def passed_chunks(
    chunks: AsyncIterator[bytes], state: RequestState, status: int
) -> AsyncIterator[bytes]:
    """As PassedResponse, for async chunks, after an empty one: what was begun is closed also where
    nobody reads it. Django's ASGI handler reads no further if a client disconnects.
    """
    try:
        yield b""
        async for chunk in chunks:
            yield chunk
    except BaseException as error:
        await state.passed(status, error)
        raise
    await state.passed(status)
