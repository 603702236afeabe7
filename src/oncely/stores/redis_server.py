"""The line to one Redis: connections, scripts, patience, and errors in the ledger's words."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from redis import ConnectionPool, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from oncely.core.errors import StoreError, StoreUnavailable, mask_passwords
from oncely.stores.retrying import TryAgain, patiently

_CONNECT_TIMEOUT_S = 2.0
_TIMEOUT_S = 5.0
_CONNECTIONS = 10_000
"""As many as a server accepts by default: it is the number of threads that bounds them."""

# Codes of errors with which a server says that it has done nothing: those that pass by themselves,
# and those that do not.
_PASSING = ("LOADING", "BUSY", "READONLY", "MASTERDOWN")
_LASTING = ("OOM", "MISCONF", "NOREPLICAS")
_CODE = re.compile(rf"\b({'|'.join((*_PASSING, *_LASTING))})\b")
# redis-py takes the code off the text of these.
_CODES: Mapping[type[exceptions.RedisError], str] = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.OutOfMemoryError: "OOM",
}


class Script:
    """A Lua script, put together of files in the folder `redis_lua`."""

    def __init__(self, *names: str) -> None:
        folder = resources.files("oncely.stores") / "redis_lua"
        self.source = "\n".join((folder / f"{name}.lua").read_text("utf-8") for name in names)
        self.digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class RedisServer:
    """One Redis, at `url`. Safe to share between threads, and with a forked child.

    Raises ValueError or TypeError for a URL that is wrong; whatever is asked later raises what the
    Store protocol says.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool, self._pid = self._new_pool(), os.getpid()
        settings = self._pool.connection_kwargs
        # Only looks whether the settings will do: it does not connect yet.
        self._pool.connection_class(**settings)
        self.name = f"redis://{settings['host']}:{settings['port']}/{settings['db']}"
        """Where it is, for errors and logs."""

    def run(self, script: Script, *words: str, lost: type[Exception]) -> Any:
        """What `script` answers. Where its reply is lost it is sent again, or raises `lost`."""

        def exchange(connection: Any) -> Any:
            try:
                return _call(connection, "EVALSHA", script.digest, "0", *words)
            except exceptions.NoScriptError:
                # A server that was started anew has forgotten it; so nothing was done.
                return _call(connection, "EVAL", script.source, "0", *words)

        return patiently(lambda: self._try(exchange, lost))

    def ask(self, *words: str) -> Any:
        """What the server answers to a command that may be sent again."""
        return patiently(
            lambda: self._try(lambda connection: _call(connection, *words), lost=TryAgain)
        )

    def info(self) -> Mapping[str, str]:
        """What the server tells about itself."""
        lines = str(self.ask("INFO")).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def close(self) -> None:
        """Give back the connections that are not in use."""
        self._own_pool().disconnect(inuse_connections=False)

    def _own_pool(self) -> ConnectionPool:
        # redis-py gives a child connections of its own, too, but takes a lock for it that another
        # thread of the parent may have held at the moment of the fork.
        if self._pid != os.getpid():
            self._pool, self._pid = self._new_pool(), os.getpid()
        return self._pool

    def _new_pool(self) -> ConnectionPool:
        return ConnectionPool.from_url(
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
        pool = self._own_pool()
        try:
            connection: Any = pool.get_connection()
        except exceptions.RedisError as error:
            raise self._translated(error, lost=TryAgain) from error
        try:
            return exchange(connection)
        except BaseException as error:
            # No reply that may still arrive is to be taken for that to another question. And a
            # server that was the master, and is no more, refuses for as long as the line lives.
            connection.disconnect()
            if isinstance(error, exceptions.RedisError):
                raise self._translated(error, lost) from error
            raise
        finally:
            pool.release(connection)

    def _translated(self, error: exceptions.RedisError, lost: type[Exception]) -> Exception:
        """The error that the Store protocol promises, for one from the driver."""
        text = mask_passwords(f"{self.name}: {error}")
        found = _CODE.search(str(error))
        code = found.group() if found else _CODES.get(type(error))
        if code in _PASSING:
            return TryAgain(text)
        if code in _LASTING:
            return StoreUnavailable(text)
        # redis-py counts this among the errors of a connection, but it is an answer.
        is_answer = isinstance(error, exceptions.AuthenticationError)
        if is_answer or not isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError):
            return StoreError(text)
        return lost(text)


def _call(connection: Any, *words: str) -> Any:
    connection.send_command(*words)
    return connection.read_response()
