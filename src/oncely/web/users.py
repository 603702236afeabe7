"""Who looks at the dashboard, and what they may do."""

from collections.abc import Awaitable, Callable, MutableMapping
from enum import StrEnum
from typing import Any, NamedTuple


class Role(StrEnum):
    """What somebody may do."""

    VIEWER = "viewer"
    OPERATOR = "operator"


class User(NamedTuple):
    """Somebody who has said who they are."""

    name: str
    role: Role = Role.VIEWER

    @property
    def may_change(self) -> bool:
        """Whether they may do more than look."""
        return self.role is Role.OPERATOR


Scope = MutableMapping[str, Any]
"""An ASGI scope: what a server knows of a request before its body."""

Auth = Callable[[Scope], "User | Awaitable[User | None] | None"]
"""Says who asks; None for nobody who may look."""


def header(scope: Scope, name: str) -> str | None:
    """A header of the request; None where it is not there, or there more than once."""
    wanted = name.lower().encode("latin-1")
    found = [value for each, value in scope["headers"] if each.lower() == wanted]
    return found[0].decode("latin-1") if len(found) == 1 else None
