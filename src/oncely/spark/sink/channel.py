"""The channel between a pipeline's driver and its tasks: for progress, and to stop the tasks.

Spark kills tasks without notice, but a task that holds claims must be asked to stop. And the counts
of a batch are added up in a process of Spark's own, which reports them to the pipeline.

A task connects now and then, reports its progress, learns whether to stop and when to connect
again, and disconnects: for any number of tasks the driver has one thread and a few open
connections. A caller must first prove that it knows the token; before that its input is not read.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from pyspark.sql import SparkSession

from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.errors import OncelyError
from oncely.spark.sink.counts import Counts

_log = EventLog(__name__)

_BACKLOG = 1_024
_POLL_S = 0.1
_CALL_EVERY_S = 0.25
_CALLS_PER_S = 400
"""The target for calls per second at the driver: with more tasks, each calls less often."""
_ANSWER_WITHIN_S = 10.0
_SILENT_S = 10.0
"""A task whose call is so late counts as killed."""
_CALLS = 3
"""After so many failed calls in a row the driver counts as gone."""
_CALL_AGAIN_S = 0.2
_ABORTS = (OSError, EOFError, ValueError, KeyError, TypeError, asyncio.LimitOverrunError)
"""The errors of a wrong or broken call; a TimeoutError is an OSError."""
_CHALLENGE = 32
_PROOF = 64
_MAX_CALLERS = 256
"""The most connections at a time: for a new one, the oldest is closed."""
_MAX_BYTES = 256 * 1024
"""The longest message of a caller: counts with all possible reasons are shorter."""


class Stopped(OncelyError):
    """The task was told to stop. Handled messages are completed, others are released."""


@dataclass
class _Attempt:
    """The last report of a task's attempt; Spark may run a task twice, also at the same time."""

    task: str
    number: int
    """The number of the call: a late call with a lower number is ignored."""
    counts: Counts
    heard_at: float
    is_running: bool
    is_of_open_batch: bool


class DriverChannel:
    """The driver's end. Adds up the tasks' reports, and tells all tasks to stop.

    Tasks connect to `host`; the driver listens on `bind`, by default the same.
    """

    def __init__(self, host: str, bind: str | None = None) -> None:
        self.token = secrets.token_hex(16)
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            _plain(bind or host), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self._listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """The host:port for the sink's option."""
        self.refusal: str | None = None
        """Why no task goes on: the permanent error of the store that has ended one, for example."""
        self._lock = threading.Lock()
        self._attempts: dict[str, _Attempt] = {}
        self._committed = Counts()
        self._last_batch = ""
        self._stopping = False
        self._callers: dict[asyncio.StreamWriter, None] = {}
        """The open connections, the oldest first."""
        self._outage = Outage(
            _log,
            "channel_error",
            "the channel to the tasks had an error: %(reason)s; it goes on",
            "channel_recovered",
            "the channel takes calls of tasks again after %(away_s)s s",
        )
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="oncely-channel", daemon=True)
        self._thread.start()

    def committed(self) -> Counts:
        """The counts of all committed batches."""
        with self._lock:
            return self._committed

    def progress(self) -> Counts:
        """The counts of committed batches, and of the open batch so far: of the attempt of a task
        that came furthest.
        """
        with self._lock:
            self._forget_silent()
            furthest: dict[str, Counts] = {}
            for attempt in self._attempts.values():
                known = furthest.get(attempt.task)
                if attempt.is_of_open_batch and (
                    known is None or known.received < attempt.counts.received
                ):
                    furthest[attempt.task] = attempt.counts
            return sum(furthest.values(), self._committed)

    def stop(self, grace_s: float) -> None:
        """Tell all tasks to stop; return when they have, or after `grace_s`."""
        with self._lock:
            self._stopping = True
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            with self._lock:
                self._forget_silent()
                if not self._number_running():
                    return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def _number_running(self) -> int:
        return sum(attempt.is_running for attempt in self._attempts.values())

    def _call_every_s(self) -> float:
        return max(_CALL_EVERY_S, self._number_running() / _CALLS_PER_S)

    def _forget_silent(self) -> None:
        """Forget tasks that were killed; a slow task is known again at its next call."""
        heard_since = time.monotonic() - _SILENT_S - self._call_every_s()
        self._attempts = {
            name: attempt
            for name, attempt in self._attempts.items()
            if not attempt.is_running or attempt.heard_at >= heard_since
        }

    # ---- Calls ---------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        # For example, no file descriptor is left. asyncio accepts again a second later.
        self._loop.set_exception_handler(lambda _, told: self._outage.met(str(told)))
        # asyncio tries to accept, and fails, as many times in a row as its backlog says.
        server = await asyncio.start_server(
            self._take_call, sock=self._listener, limit=_MAX_BYTES, backlog=1
        )
        self._listener.listen(_BACKLOG)
        await self._over.wait()
        # A call that is cancelled before it has begun would leave its connection open; so would one
        # that is accepted while the server is closed.
        self._loop.remove_reader(self._listener)
        while asyncio.all_tasks() - {asyncio.current_task()}:
            for caller in [*self._callers]:
                caller.transport.abort()
            await asyncio.sleep(0)
        server.close()

    async def _take_call(self, reader: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        self._outage.over()
        self._callers[caller] = None
        if len(self._callers) > _MAX_CALLERS:
            oldest = next(iter(self._callers))
            del self._callers[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                challenge = secrets.token_bytes(_CHALLENGE // 2).hex().encode()
                caller.write(challenge)
                proof = await reader.readexactly(_PROOF)
                if not hmac.compare_digest(proof, _proof(self.token, challenge)):
                    return
                said = json.loads(await reader.readuntil(b"\n"))
                caller.write(_line(self._hear(said)))
                await caller.drain()
        except _ABORTS as error:
            _log.debug(
                "a call of a task was aborted: %(reason)s",
                error=error,
                extra={"event": "channel_call_aborted"},
            )
        finally:
            self._callers.pop(caller, None)
            caller.close()

    def _hear(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Process a caller's message, and return the answer."""
        counts = Counts(**said["counts"])
        with self._lock:
            # A caller that has not received the answer repeats its message.
            if "batch" in said and said["batch"] != self._last_batch:
                self._last_batch = said["batch"]
                self._committed += counts
                # A task that still runs is a second attempt: only the stop is sent to it.
                self._attempts = {
                    name: replace(attempt, is_of_open_batch=False)
                    for name, attempt in self._attempts.items()
                    if attempt.is_running
                }
            elif "batch" not in said:
                self.refusal = self.refusal or said["refusal"]
                known = self._attempts.get(said["attempt"])
                if known is None or known.number < said["number"]:
                    self._attempts[said["attempt"]] = _Attempt(
                        task=said["task"],
                        number=said["number"],
                        counts=counts,
                        heard_at=time.monotonic(),
                        is_running=said["is_running"],
                        is_of_open_batch=known is None or known.is_of_open_batch,
                    )
            return {"stop": self._stopping, "again_s": self._call_every_s()}


def driver_channel(spark: SparkSession) -> DriverChannel:
    """A channel at the address by which tasks reach Spark's driver."""
    host = spark.conf.get("spark.driver.host", "127.0.0.1") or ""
    return DriverChannel(host, spark.conf.get("spark.driver.bindAddress", host))


class TaskChannel:
    """The task's end. Without an address it does not report, and is never told to stop.

    `task` is the same for all attempts of a task. Raises OncelyError if the address does not
    answer: the driver is gone.
    """

    def __init__(self, address: str | None, token: str, task: str | None = None) -> None:
        self.stopping = threading.Event()
        self._ended = threading.Event()
        self._attempt = uuid4().hex
        self._task = task or self._attempt
        self._number = 0
        self._counts = Counts()
        self._again_s = 0.0
        self._refusal: str | None = None
        self._line = None if address is None else (address, token)
        self._thread = threading.Thread(target=self._call_again, name="oncely-channel", daemon=True)
        if self._line is not None:
            self._take(_ask_patiently(*self._line, self._said(is_running=True)))
            self._thread.start()

    def report(self, counts: Counts) -> None:
        """Set the counts that the next call reports."""
        if self._line is not None:
            # A copy: `counts` changes further.
            self._counts = replace(counts)

    def raise_if_stopping(self) -> None:
        """Raises Stopped if the task is told to stop."""
        if self.stopping.is_set():
            raise Stopped("the pipeline was told to stop")

    def refuse(self, why: str) -> None:
        """Stop this task, and let the driver stop all others, for this reason."""
        self._refusal = why
        self.stopping.set()

    def wait(self, until: float) -> None:
        """Wait until that moment (monotonic). Raises Stopped."""
        self.stopping.wait(max(0.0, until - time.monotonic()))
        self.raise_if_stopping()

    def close(self, counts: Counts | None = None, refusal: str | None = None) -> None:
        """End the calls; with `counts` if the task has succeeded, with the store's `refusal` if
        no task can.
        """
        if self._line is None:
            return
        self._ended.set()
        self._thread.join()
        self._counts = counts or self._counts
        with contextlib.suppress(OSError, ValueError):
            _ask(*self._line, self._said(is_running=False, refusal=refusal or self._refusal))

    def _call_again(self) -> None:
        """Call until the task has ended, also after it is told to stop: the driver waits for it."""
        failed = 0
        while self._line is not None and not self._ended.wait(self._again_s):
            try:
                self._take(_ask(*self._line, self._said(is_running=True)))
                failed = 0
            except (OSError, ValueError):
                failed += 1
                if failed == _CALLS:
                    # The driver is gone: the work of this task would not be committed.
                    self.stopping.set()
                    return

    def _said(self, *, is_running: bool, refusal: str | None = None) -> dict[str, Any]:
        self._number += 1
        return {
            "attempt": self._attempt,
            "task": self._task,
            "number": self._number,
            "is_running": is_running,
            "refusal": refusal,
            "counts": vars(self._counts),
        }

    def _take(self, told: Mapping[str, Any]) -> None:
        self._again_s = float(told["again_s"])
        if told["stop"]:
            self.stopping.set()


def report_batch(address: str, token: str, counts: Counts) -> None:
    """Report a committed batch's counts to the driver. Raises OncelyError if it cannot be reached.

    After this returns, Spark may end the query, and the pipeline reads the counts.
    """
    _ask_patiently(address, token, {"batch": uuid4().hex, "counts": vars(counts)})


def _plain(host: str) -> str:
    """The host without Spark's brackets around an IPv6 address."""
    return host.strip("[]")


def _ask_patiently(address: str, token: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a call. Raises OncelyError if all attempts fail."""
    for _ in range(_CALLS):
        try:
            return _ask(address, token, said)
        except (OSError, ValueError) as error:
            last = error
            time.sleep(_CALL_AGAIN_S)
    raise OncelyError(f"the pipeline's driver at {address} cannot be reached: {last}") from last


def _ask(address: str, token: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a call. Raises OSError and ValueError."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((_plain(host), int(port)), _ANSWER_WITHIN_S) as connection,
        connection.makefile("rb") as answers,
    ):
        challenge = answers.read(_CHALLENGE)
        connection.sendall(_proof(token, challenge) + _line(said))
        told = answers.readline(_MAX_BYTES)
    if not told:
        raise ConnectionAbortedError("it hung up")
    answer: dict[str, Any] = json.loads(told)
    return answer


def _proof(token: str, challenge: bytes) -> bytes:
    return hmac.new(token.encode(), challenge, "sha256").hexdigest().encode()


def _line(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"
