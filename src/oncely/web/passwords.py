"""Basic authentication by a file of hashed passwords."""

import base64
import binascii
import hashlib
import hmac
import secrets
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from oncely.core.errors import ConfigError
from oncely.web.users import Role, Scope, User, header

_COST, _BLOCK, _PARALLEL = 2**15, 8, 3
"""Of scrypt, as OWASP advises: 32 MiB for each of three passes."""
_MAX_MEMORY = 64 * 2**20
_SALT_BYTES = 16
_KIND = "scrypt"


class _Known(NamedTuple):
    user: User
    salt: bytes
    hashed: bytes


def password_line(name: str, password: str, role: Role = Role.VIEWER) -> str:
    """A line of the file: the user's name, role and hashed password.

    Raises ConfigError for a name that a line or a browser cannot hold, and for no password.
    """
    if not name or ":" in name or not name.isprintable() or name != name.strip():
        raise ConfigError(f"user: {name!r} is not a name; write letters, without a colon")
    if not password:
        raise ConfigError("password: it is empty; type one")
    salt = secrets.token_bytes(_SALT_BYTES)
    hashed = _hash(password, salt)
    return ":".join(
        [name, role, _KIND, *(base64.b64encode(each).decode() for each in (salt, hashed))]
    )


class PasswordAuth:
    """Basic authentication: who is in the file, and knows the password, may come in.

    The file is read once; raises ConfigError where that cannot be done.
    """

    challenge = 'Basic realm="oncely", charset="UTF-8"'
    """What a browser is answered, so that it asks for name and password."""

    def __init__(self, file: str | Path) -> None:
        self._users: Mapping[str, _Known] = dict(_read(Path(file)))
        # Hashing takes a fraction of a second and 32 MiB: one at a time.
        self._hashing = threading.Lock()
        self._secret = secrets.token_bytes(32)
        self._proved: dict[str, bytes] = {}
        self._decoy = secrets.token_bytes(_SALT_BYTES)

    async def __call__(self, scope: Scope) -> User | None:
        """Who asks."""
        given = _given(header(scope, "authorization") or "")
        if given is None:
            return None
        name, password = given
        # What was right a moment ago is not hashed again for each picture and page.
        digest = hmac.digest(self._secret, f"{name}:{password}".encode(), "sha256")
        if hmac.compare_digest(self._proved.get(name, b""), digest):
            return self._users[name].user
        if not await run_in_threadpool(self._is_right, name, password):
            return None
        self._proved[name] = digest
        return self._users[name].user

    def _is_right(self, name: str, password: str) -> bool:
        known = self._users.get(name)
        with self._hashing:
            # Also for a name that is not known: the time tells nobody which are.
            hashed = _hash(password, self._decoy if known is None else known.salt)
        return known is not None and hmac.compare_digest(hashed, known.hashed)


def _hash(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(
        password.encode(), salt=salt, n=_COST, r=_BLOCK, p=_PARALLEL, maxmem=_MAX_MEMORY
    )


def _given(authorization: str) -> tuple[str, str] | None:
    kind, _, encoded = authorization.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        text = base64.b64decode(encoded.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    name, colon, password = text.partition(":")
    return (name, password) if colon else None


def _read(file: Path) -> Iterator[tuple[str, _Known]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"passwords: {str(file)!r} cannot be read: {reason}") from error
    found = False
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            found = True
            yield _known(line, f"passwords: {str(file)!r}, line {number}")
    if not found:
        raise ConfigError(
            f"passwords: nobody is in {str(file)!r}; "
            "type: oncely web --make-password NAME --role operator"
        )


def _known(line: str, where: str) -> tuple[str, _Known]:
    try:
        name, role, kind, salt, hashed = line.strip().split(":")
        if kind != _KIND or not name:
            raise ValueError(kind)
        user = User(name, Role(role))
        return name, _Known(user, base64.b64decode(salt), base64.b64decode(hashed))
    except ValueError:
        # Not what stands there: it may be a password.
        raise ConfigError(
            f"{where}: it is not of the form that oncely web --make-password NAME prints"
        ) from None
