"""One Redis: its pool, scripts, retries, errors in the ledger's terms, and whether its settings are
safe for a ledger, as INFO shows them.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis import ConnectionPool, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from oncely._util.forking import afresh_in_children
from oncely._util.tls import advice
from oncely.core.errors import StoreDenied, StoreError, StoreUnavailable, mask_passwords
from oncely.stores.retrying import TryAgain, patiently

_CONNECT_TIMEOUT_S = 2.0
_TIMEOUT_S = 5.0
_CONNECTIONS = 10_000
"""As many as a server accepts by default: the number of threads limits them in practice."""

# Codes of errors after which a server has done nothing: those that pass by themselves, and those
# that last.
_PASSING = ("LOADING", "BUSY", "READONLY", "MASTERDOWN")
_LASTING = ("OOM", "MISCONF", "NOREPLICAS")
_CODE = re.compile(rf"\b({'|'.join((*_PASSING, *_LASTING))})\b")
_DENIED = "The user executing the script can't"
# redis-py removes the code from the text of these errors.
_CODES: Mapping[type[exceptions.RedisError], str] = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.OutOfMemoryError: "OOM",
}

_OURS = ("cache", "decode_responses", "encoding", "encoding_errors", "protocol", "retry")
"""Settings of redis-py that a URL cannot change: answers could not be read else."""
_POLICY = "noeviction"
READS = (
    "info time scan exists hget hgetall hmget memory|usage smembers zcard zcount zrange zrank"
    " zscore"
)
"""The commands of every program, besides EVAL and EVALSHA."""
WRITES = "del hdel hincrby hset sadd srem zadd zrem"
"""Those of every program but a reader."""


class Script:
    """A Lua script, joined from files in the folder `redis_lua`."""

    def __init__(self, *names: str) -> None:
        folder = resources.files("oncely.stores") / "redis_lua"
        self.source = "\n".join((folder / f"{name}.lua").read_text("utf-8") for name in names)
        self.digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class RedisServer:
    """One Redis, at `url`. Safe to share between threads, and with a forked child.

    Raises ValueError or TypeError for a wrong URL; its methods raise what the Store protocol says.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        said = parse_qsl(parts.query, keep_blank_values=True)
        query = urlencode([(name, value) for name, value in said if name not in _OURS])
        self._url = urlunsplit(parts._replace(query=query))
        self.start_afresh()
        afresh_in_children(self)
        settings = self._pool.connection_kwargs
        # Only checks the settings: it does not connect yet.
        self._pool.connection_class(**settings)
        self._scheme = parts.scheme
        self.name = f"{self._scheme}://{settings['host']}:{settings['port']}/{settings['db']}"
        """Where it is, for errors and logs."""
        self.user = settings.get("username") or "default"

    def run(self, script: Script, *words: str, lost: type[Exception]) -> Any:
        """What `script` answers. Where its reply is lost, `lost` is raised: TryAgain repeats it."""

        def exchange(connection: Any) -> Any:
            try:
                return _call(connection, "EVALSHA", script.digest, "0", *words)
            except exceptions.NoScriptError:
                # A server that was restarted does not have the script; so nothing was done.
                return _call(connection, "EVAL", script.source, "0", *words)

        return patiently(self._try, exchange, lost)

    def ask(self, *words: str) -> Any:
        """What the server answers to a command that may be sent again."""
        return patiently(self._try, lambda connection: _call(connection, *words), TryAgain)

    def info(self) -> Mapping[str, str]:
        """The fields of the server's INFO."""
        lines = str(self.ask("INFO")).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def close(self) -> None:
        """Give back the connections that are not in use."""
        self._pool.disconnect(inuse_connections=False)

    def start_afresh(self) -> None:
        """Leave connections to the parent: called in a forked child."""
        # redis-py, too, gives a child its own connections, but takes a lock for that, which another
        # thread of the parent may have held at the moment of the fork.
        self._pool = ConnectionPool.from_url(
            self._url,
            host="localhost",
            port=6379,
            db=0,
            # The tries are counted in `patiently`.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            decode_responses=True,
            max_connections=_CONNECTIONS,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
        )

    def _try(self, exchange: Callable[[Any], Any], lost: type[Exception]) -> Any:
        pool = self._pool
        try:
            connection: Any = pool.get_connection()
        except exceptions.RedisError as error:
            told = advice(error, "redis") if self._scheme == "rediss" else ""
            # What TLS has refused, it would refuse again, and a port without it is silent.
            lost = StoreUnavailable if told and "EOF" not in told else TryAgain
            raise self._translated(error, lost, told) from error
        except BaseException:
            # A signal handler's: redis-py has given back a connection whose replies still arrive.
            pool.disconnect(inuse_connections=False)
            raise
        try:
            return exchange(connection)
        except BaseException as error:
            # A reply that still arrives must not be taken for the reply to another command. And a
            # server that is not the master any more refuses for as long as the connection lives.
            connection.disconnect()
            if isinstance(error, exceptions.RedisError):
                raise self._translated(error, lost) from error
            raise
        finally:
            pool.release(connection)

    def _translated(
        self, error: exceptions.RedisError, lost: type[Exception], told: str = ""
    ) -> Exception:
        """The Store protocol's error for one of the driver."""
        text = mask_passwords(f"{self.name}: {error}{told}")
        found = _CODE.search(str(error))
        code = found.group() if found else _CODES.get(type(error))
        if code in _PASSING:
            return TryAgain(text)
        if code in _LASTING:
            return StoreUnavailable(text)
        if isinstance(error, exceptions.NoPermissionError) or _DENIED in text:
            return StoreDenied(text)
        # For redis-py this is an error of the connection, but it is an answer.
        is_answer = isinstance(error, exceptions.AuthenticationError)
        if is_answer or not isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError):
            return StoreError(text)
        return lost(text)


def _call(connection: Any, *words: str) -> Any:
    connection.send_command(*words)
    return connection.read_response()


def refusal(info: Mapping[str, str]) -> str | None:
    """Why this Redis cannot hold a ledger, and what to type; None where it can."""
    mode, policy = info.get("redis_mode", "standalone"), info.get("maxmemory_policy", _POLICY)
    if mode != "standalone":
        return f"it runs in mode {mode}, which is not supported; name a single server"
    if policy != _POLICY:
        return (
            f"it evicts records when memory is full (maxmemory-policy {policy}); type "
            f'"CONFIG SET maxmemory-policy {_POLICY}" in redis-cli, and '
            f'"maxmemory-policy {_POLICY}" in redis.conf'
        )
    return None


def has_aof(info: Mapping[str, str]) -> bool:
    """Whether the server keeps a log of all writes (AOF)."""
    return info.get("aof_enabled") == "1"


def problems(info: Mapping[str, str], appendfsync: str | None) -> Sequence[str]:
    """What is wrong, a sentence each. `appendfsync` is None where the server does not show it."""
    refused = refusal(info)
    found = [] if refused is None else [f"This Redis cannot hold a ledger: {refused}."]
    if not has_aof(info):
        found.append(
            "Redis keeps no log (appendonly no): a restart loses all since the last snapshot, and "
            'messages completed since then run again; type "CONFIG SET appendonly yes" in '
            'redis-cli, and "appendonly yes" in redis.conf.'
        )
    elif appendfsync != "always":
        found.append(
            f"Redis does not flush each write to the disk (appendfsync {appendfsync or 'unknown'}"
            "): a power cut loses the writes of the last second or two, and messages completed "
            'then run again; type "CONFIG SET appendfsync always" in redis-cli, and '
            '"appendfsync always" in redis.conf.'
        )
    replicas = int(info.get("connected_slaves", "0"))
    if replicas:
        found.append(
            f"Redis writes to its replicas ({replicas}) after it has answered: a failover loses "
            "the newest claims and completions, and their messages run again."
        )
    return found
