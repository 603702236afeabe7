"""Request state: a handler's access to its request, as `request.state.oncely`."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, TypeVar

from oncely.core.errors import MessageError
from oncely.http.answers import HttpAnswer
from oncely.http.request_work import RequestWork
from oncely.ledger.driver import SyncDriver, run_inline
from oncely.ledger.inbox import AsyncInbox, AsyncInboxDriver, Inbox
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle

R = TypeVar("R")


class RequestState:
    """A handler's view of its request; `key` is the client's, or None if the request has no key."""

    def __init__(
        self, ledger: Ledger, work: RequestWork | None = None, key: str | None = None
    ) -> None:
        self._ledger = ledger
        self._work = work
        self.key = key

    def transaction(self, connection: Any) -> "RequestTransaction":
        """End this request inside the caller's own transaction; for `with` and `async with`.

        `connection` is any that `Ledger.transaction` takes. The block gets an inbox, as there,
        which sends messages. At the end of the block the request's record and the deferred
        messages are written in the transaction. The caller then commits it with its own rows,
        before the response is returned or, under ASGI, before the application returns. A request
        without a key is not recorded; its deferred messages are still part of the transaction.
        """
        return RequestTransaction(self._ledger, self._work, connection)

    def is_within(self, lifecycle: Lifecycle, message_id: str) -> bool:
        """Whether this is the state of a handler of that message."""
        work = self._work
        return work is not None and work.is_of(lifecycle, message_id)

    def respond(self, answer: R) -> R:
        """Store this response in the transaction; returns it, for the handler to return.

        Call it inside the block of `transaction`. `answer` is a response of Starlette, Flask or
        Django, or an HttpAnswer; raises MessageError for anything else. Without this call the
        response is stored as soon as the handler returns it, right after the commit.
        """
        found = answer_of(answer)
        if self._work is not None:
            self._work.given = found
        return answer


class RequestTransaction:
    """The block in which a request's end becomes part of the caller's transaction."""

    def __init__(self, ledger: Ledger, work: RequestWork | None, connection: Any) -> None:
        self._ledger = ledger
        self._work = work
        self._connection = connection

    def __enter__(self) -> Inbox:
        self._entered = self._within()
        return self._entered.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._entered.__exit__(*raised)

    async def __aenter__(self) -> AsyncInbox:
        self._entered_async = self._within_async()
        return await self._entered_async.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        await self._entered_async.__aexit__(*raised)

    @contextmanager
    def _within(self) -> Iterator[Inbox]:
        with self._in_transaction(), self._ledger.transaction(self._connection) as inbox:
            yield inbox
            if self._work is not None:
                run_inline(self._work.write(SyncDriver(inbox, is_joined=True)))

    @asynccontextmanager
    async def _within_async(self) -> AsyncIterator[AsyncInbox]:
        with self._in_transaction():
            async with self._ledger.transaction(self._connection) as inbox:
                yield inbox
                if self._work is not None:
                    await self._work.write(AsyncInboxDriver(inbox))

    def _in_transaction(self) -> AbstractContextManager[None]:
        return nullcontext() if self._work is None else self._work.in_transaction()


def answer_of(response: Any) -> HttpAnswer:
    """A framework's response as HttpAnswer. Raises MessageError for other values, and streams."""
    if isinstance(response, HttpAnswer):
        return response
    status = getattr(response, "status_code", None)
    # Of Starlette, Django, and Flask (Werkzeug).
    bodies = (getattr(response, name, None) for name in ("body", "content", "data"))
    body = next((each for each in bodies if isinstance(each, bytes | bytearray | memoryview)), None)
    if not isinstance(status, int) or body is None:
        raise MessageError(
            f"respond: {type(response).__name__} is not a response with a body; hand over a "
            "Response of your framework, or oncely.http.HttpAnswer(status, headers, body)"
        )
    raw = getattr(response, "raw_headers", None)
    if raw is None:
        fields = [(str(name), str(value)) for name, value in response.headers.items()]
    else:
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
    return HttpAnswer(status, fields, bytes(body))
