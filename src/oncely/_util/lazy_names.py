"""Public names of a package, each imported when it is first asked for."""

from collections.abc import Callable
from importlib.resources import as_file, files
from typing import Any

import lazy_loader  # type: ignore[import-untyped]


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for the names in the package's `__init__.pyi`."""
    # The package may be in a zip, and a stub is read as a file.
    with as_file(files(package) / "__init__.pyi") as stub:
        return lazy_loader.attach_stub(package, str(stub))  # type: ignore[no-any-return]
