"""`oncely.ops`, imported when a command first uses it: help needs none of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncely.ops import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        return getattr(import_module("oncely.ops"), name)
