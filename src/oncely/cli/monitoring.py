"""The port of a long-running command: /metrics, and /live and /ready for probes."""

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from oncely._util.event_log import EventLog
from oncely._util.signals import is_process_stopping
from oncely.cli.options import RunOptions
from oncely.consumer.health import Health
from oncely.core.errors import ConfigError, OncelyError, describe
from oncely.ledger.ledger import Ledger

if TYPE_CHECKING:
    from prometheus_client import Metric

_log = EventLog(__name__)

_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_ASK_EVERY_S = 1.0
_COUNT_EVERY_S = 60.0
"""How often records are counted: of a million that takes a tenth of a second of the database."""

Healths = Callable[[], Mapping[str, Health]]
"""The health of each process by its name, which is empty if there is one process."""


def observed(ledger: Ledger | None) -> None:
    """Have metrics in the default registry, which count the ledger's work unless it has its own.

    Raises ConfigError if prometheus_client is not installed.
    """
    try:
        from oncely.metrics import Metrics
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--metrics-port: prometheus_client is not installed; "
            "type: pip install 'oncely[metrics]'"
        ) from error
    if ledger is not None and ledger.recorder.metrics is not None:
        return
    with suppress(ConfigError):  # The user's program has registered some already.
        metrics = Metrics()
        if ledger is not None:
            ledger.recorder.metrics = metrics


@contextmanager
def shared_metrics(running: RunOptions) -> Iterator[Mapping[str, str]]:
    """The environment for workers, so that this process can show the sums of their metrics."""
    if running.metrics_port is None:
        yield {}
        return
    with TemporaryDirectory(prefix="oncely-metrics-") as folder:
        yield {_MULTIPROCESS: folder}


def forget_dead(shared: Mapping[str, str], pid: int) -> None:
    """Remove the gauges of a worker that died; its counters stay."""
    if shared:
        from prometheus_client import multiprocess

        multiprocess.mark_process_dead(pid, shared[_MULTIPROCESS])  # type: ignore[no-untyped-call]


@contextmanager
def monitored(
    running: RunOptions,
    ledger: Ledger | None,
    healths: Healths,
    workers: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Within the block, serve --metrics-port if the user named it; `workers` is from
    `shared_metrics`. Raises ConfigError if the port cannot be opened.
    """
    if running.metrics_port is None:
        yield
        return
    monitor = _Monitor(ledger, healths, (workers or {}).get(_MULTIPROCESS))
    server = _server(running.metrics_host, running.metrics_port, monitor)
    host, port = server.server_address[:2]
    _log.info(
        "metrics are served on %(host)s, port %(port)s",
        extra={"event": "metrics_served", "host": host, "port": port},
    )
    threading.Thread(target=server.serve_forever, name="oncely-metrics", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Monitor:
    """The response of each path."""

    def __init__(self, ledger: Ledger | None, healths: Healths, folder: str | None) -> None:
        observed(ledger)
        from oncely.metrics import LedgerGauges

        # One for all scrapes: it remembers whether the ledger could be read.
        self._gauges = None
        if ledger is not None:
            quickly = ledger.counts_quickly
            self._gauges = LedgerGauges(ledger, records=quickly, every_s=_COUNT_EVERY_S)
        self._ledger = ledger
        self._healths = healths
        self._folder = folder
        self._asking = threading.Lock()
        self._ask_at = 0.0
        self._away: str | None = None

    def answer(self, path: str) -> tuple[int, str]:
        """The status and the text of the answer to GET `path`."""
        match path:
            case "/metrics":
                from prometheus_client import generate_latest

                return 200, generate_latest(self).decode()
            case "/live":
                return _told(self._still(), "live")
            case "/ready" if is_process_stopping():
                return _told(["it is stopping"], "ready")
            case "/ready":
                healths = self._healths().items()
                found = [_named(name, each.unready) for name, each in healths if each.unready]
                away = self._ledger_away()
                return _told(self._still() + found + ([away] if away else []), "ready")
            case _:
                return 404, "not found: the paths are /metrics, /live and /ready\n"

    def collect(self) -> "Collection[Metric]":
        """All metrics, as prometheus_client takes them."""
        from prometheus_client import REGISTRY
        from prometheus_client.multiprocess import MultiProcessCollector

        # First the workers': this process itself has counted nothing of what its workers count.
        folder = None if self._folder is None else Path(self._folder)
        files = [str(each) for each in folder.glob("*.db") if _has_begun(each)] if folder else []
        counted = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        gauges = [] if self._gauges is None else self._gauges.collect()
        of_names: dict[str, Metric] = {}
        for metric in chain(counted, REGISTRY.collect(), gauges):
            of_names.setdefault(metric.name, metric)
        return of_names.values()

    def _still(self) -> list[str]:
        """The loops that are stuck."""
        if is_process_stopping():
            return []
        return [
            _named(name, f"the loop has not moved for {each.still_s:.0f} s")
            for name, each in self._healths().items()
            if not each.is_live
        ]

    def _ledger_away(self) -> str | None:
        """Why the ledger cannot be reached, if so; requests share one call for a short time."""
        if self._ledger is None:
            return None
        with self._asking:
            if time.monotonic() >= self._ask_at:
                try:
                    self._ledger.now()
                    self._away = None
                except OncelyError as error:
                    self._away = f"the ledger cannot be reached: {describe(error, 200)}"
                self._ask_at = time.monotonic() + _ASK_EVERY_S
            return self._away


def _named(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text


def _told(wrong: list[str], right: str) -> tuple[int, str]:
    return 503 if wrong else 200, "\n".join(wrong or [right]) + "\n"


def _has_begun(file: Path) -> bool:
    """Whether the file has content: a worker that has just started, or was killed just then, has
    created it and written nothing.
    """
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


def _server(host: str, port: int, monitor: _Monitor) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                status, text = monitor.answer(self.path.partition("?")[0])
            except Exception:  # noqa: BLE001 - the client gets a response of 500.
                _log.exception(
                    "a request of %(path)s could not be answered: %(reason)s; the answer is 500",
                    extra={"event": "monitoring_failed", "path": self.path},
                )
                status, text = 500, "internal error: see the log\n"
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name.
            """Log nothing: probes come every few seconds."""

    try:
        return (_Server6 if ":" in host else ThreadingHTTPServer)((host, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port: {host}:{port} cannot be opened ({error.strerror}); name another, "
            "or 0 for any free port"
        ) from error
