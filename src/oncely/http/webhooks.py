"""Webhooks: verifies deliveries, and stores each once in a queue, for a Consumer."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from oncely._util.event_log import EventLog
from oncely._util.forking import afresh_in_children
from oncely._util.outage import Outage
from oncely.core.commands import ClaimOutcome, Duplicate, Granted
from oncely.core.durations import Duration, positive_seconds
from oncely.core.errors import ConfigError, MessageError, StoreError
from oncely.core.ids import check_id
from oncely.core.message import Message, check_message
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.core.refusals import refusal
from oncely.core.sizes import Size, bytes_in
from oncely.core.waiting import queue_named
from oncely.http.answers import HttpAnswer, as_text, by_name
from oncely.http.asgi import Receive, Scope, Send, read_body, send_whole
from oncely.http.problems import Refused, too_large
from oncely.http.signatures import Reads, SignatureError, Verifier, check_reads
from oncely.http.wsgi import Environ, StartResponse, fields_in, pieces_in, start_whole
from oncely.ledger.async_ledger import running_loop
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger, checked_ledger
from oncely.lifecycle.retention import StoredRetention

_log = EventLog(__name__)

_JSON = "application/json"
_RETRY_S = 5
_THREADS = 8
_KEPT_APART = frozenset({"authorization", "proxy-authorization", "cookie"})
"""Header fields that are not stored in messages: they are secrets that no handler needs."""


class Webhook:
    """An endpoint that stores each delivery once in a `queue` of the ledger's database; for ASGI.
    Use `wsgi` for WSGI, and `receive` for any other server.

    `verify` is the sender's: `github(secret)`, `stripe(secret)` and so on. `message_id` replaces
    its function for the delivery's id. If a delivery is not stored within `timeout`, the response
    is 503, and the sender delivers again: choose a time within the sender's own limit. The ids of
    deliveries are kept for `retention`. Raises ConfigError for wrong options, and for a ledger
    that keeps no queues.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        queue: str,
        verify: Verifier,
        message_id: Reads | None = None,
        max_body: Size = "1MiB",
        timeout: Duration = "2s",
        retention: Duration = "30d",
    ) -> None:
        _check(ledger, queue, verify)
        self._ledger = ledger
        self._queue = queue
        self._verifier = verify
        if message_id is not None:
            check_reads(message_id, "message_id")
        self._message_id = message_id or verify.message_id
        self._max_body = bytes_in(max_body, "max_body")
        self._timeout_s = positive_seconds(timeout, "timeout", 'refuse all; write "2s"')
        self._consumer = f"webhook:{queue}"
        self._policy = Policy(retention=retention)
        self._retention = StoredRetention(ledger, self._consumer, retention)
        self._outage = Outage(
            _log,
            "delivery_not_stored",
            "delivery '%(message_id)s' for queue '%(queue)s' could not be stored: %(reason)s; "
            "the sender is answered with 503, and repeats it",
            "deliveries_stored",
            "deliveries for queue '%(queue)s' are stored again after %(away_s)s s",
            level=logging.ERROR,
            queue=queue,
        )
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave the threads to the parent: called in a forked child."""
        self._threads = ThreadPoolExecutor(_THREADS, "oncely-webhook")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http":
            raise RuntimeError(f"webhook: it takes requests of HTTP, not of {scope['type']}")
        headers = by_name(as_text(scope["headers"]))
        body = bytearray()
        try:
            await read_body(receive, partial(self._write, body))
            received = self._received(scope["method"], headers, bytes(body))
            if isinstance(received, Message):
                result = partial(self._result_async, running_loop())
                received = await self._stored(received, result)
        except Refused as refused:
            received = self._refused(refused.problem.status, refused.problem.title)
        # A client that has gone may still listen, and where not, a server may say so.
        with suppress(OSError):
            await send_whole(send, received)

    def wsgi(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Handle one WSGI request."""
        body = bytearray()
        try:
            for piece in pieces_in(environ):
                self._write(body, piece)
        except Refused as refused:
            answer = self._refused(refused.problem.status, refused.problem.title)
        else:
            fields = dict(fields_in(environ))
            answer = self.receive(environ["REQUEST_METHOD"], fields, bytes(body))
        return start_whole(start_response, answer)

    def _write(self, body: bytearray, piece: bytes) -> None:
        body += piece
        if len(body) > self._max_body:
            raise Refused(too_large(self._max_body))

    def receive(self, method: str, headers: Mapping[str, str], body: bytes) -> HttpAnswer:
        """Handle one request, given its header fields and its raw body."""
        received = self._received(method, by_name(headers.items()), body)
        if isinstance(received, Message):
            return run_inline(self._stored(received, self._result))
        return received

    def _received(
        self, method: str, headers: Mapping[str, str], body: bytes
    ) -> Message | HttpAnswer:
        """The message of a request, or the response to a request without a message."""
        if method != "POST":
            return _told(405, "deliveries are sent by POST", ("Allow", "POST"))
        if len(body) > self._max_body:
            return self._refused(413, f"the body is over {self._max_body} bytes")
        try:
            self._verifier.check(headers, body, time.time())
        except SignatureError as error:
            return self._refused(401, str(error), headers)
        try:
            if (reply := self._verifier.reply(body)) is not None:
                return _plain(200, reply.encode())
            return self._message(headers, body)
        except MessageError as error:
            return self._refused(400, str(error), headers)

    def _message(self, headers: Mapping[str, str], body: bytes) -> Message:
        json = self._verifier.json_in(headers, body)
        content = body if json is None else json
        message_id = check_id(self._message_id(headers, content))
        kept = {name: value for name, value in headers.items() if name not in _KEPT_APART}
        try:
            message_type = self._verifier.message_type(headers, content)
        except MessageError:
            message_type = None  # The body is not JSON: the type is not needed here.
        return check_message(
            Message(
                message_id,
                content,
                type=message_type or "",
                headers=kept,
                source=self._verifier.sender,
                content_type=headers.get("content-type", "") if json is None else _JSON,
            )
        )

    def _refused(self, status: int, reason: str, headers: Mapping[str, str] = {}) -> HttpAnswer:
        facts: dict[str, Any] = {"queue": self._queue, "status": status, "reason": reason}
        which = "a delivery"
        # The id that it claims to have, where its headers say that: nobody reads its body.
        with suppress(Exception):
            facts["message_id"] = check_id(self._message_id(headers, b""))
            which = "delivery '%(message_id)s'"
        _log.warning(
            f"{which} for queue '%(queue)s' was refused with %(status)s: %(reason)s",
            extra={"event": "delivery_refused", **facts},
        )
        return _told(status, reason)

    async def _stored(
        self, message: Message, result: Callable[[Future[ClaimOutcome]], Awaitable[ClaimOutcome]]
    ) -> HttpAnswer:
        """Store the message in a thread, while the request waits for its `result`. Work that has
        begun goes on: the next delivery finds its result. Work that has not begun is dropped when
        the request ends, so that memory holds no more than the waiting requests while the store is
        down.
        """
        held = [message]
        storing = self._threads.submit(lambda: self._put(held.pop()))
        try:
            outcome = await result(storing)
        except (StoreError, TimeoutError) as error:
            return self._away(message, error)
        finally:
            if storing.cancel():
                held.clear()
        match outcome:
            case Granted():
                self._outage.over()
                return _told(202, "stored")
            case Duplicate():
                self._outage.over()
                _log.info(
                    "delivery '%(message_id)s' for queue '%(queue)s' is a duplicate: it was stored "
                    "before",
                    extra={"event": "duplicate", "message_id": message.id, "queue": self._queue},
                )
                return _told(200, "stored before")
        return self._away(message, refusal(outcome))

    async def _result(self, storing: Future[ClaimOutcome]) -> ClaimOutcome:
        return storing.result(self._timeout_s)

    async def _result_async(
        self, loop: asyncio.AbstractEventLoop, storing: Future[ClaimOutcome]
    ) -> ClaimOutcome:
        future = asyncio.wrap_future(storing, loop=loop)
        return await asyncio.wait_for(future, self._timeout_s)

    def _put(self, message: Message) -> ClaimOutcome:
        key = Key(self._consumer, message.id)
        self._ledger.recorder.handles_as("webhook", self._consumer)
        outcome = self._ledger.mailbox.put_once(key, self._queue, message, self._policy)
        self._retention.store()
        return outcome

    def _away(self, message: Message, error: Exception) -> HttpAnswer:
        self._outage.met(error, message_id=message.id)
        return _told(503, "it cannot be stored now", ("Retry-After", str(_RETRY_S)))


webhook = Webhook
"""The endpoint as applications write it: `webhook(ledger, queue="github", verify=...)`."""


def _told(status: int, text: str, *fields: tuple[str, str]) -> HttpAnswer:
    return _plain(status, f"{text}\n".encode(), *fields)


def _plain(status: int, body: bytes, *fields: tuple[str, str]) -> HttpAnswer:
    plain = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    return HttpAnswer(status, [*plain, *fields], body)


def _check(ledger: Ledger, queue: str, verify: Verifier) -> None:
    checked_ledger(ledger, "webhook")
    if not ledger.can_defer:
        raise ConfigError(
            "webhook: this ledger keeps no queues; open it on a database, as in "
            '"postgresql://user@host/database"'
        )
    if not isinstance(verify, Verifier):
        raise ConfigError("verify: it says nothing of a sender; write verify=github(secret)")
    try:
        check_id(queue_named(check_id(queue, "queue")), "queue")
    except MessageError as error:
        raise ConfigError(f"queue: {error}") from None
