"""Whatever a public signature names can be imported by users, to be typed, made or caught."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from sqlalchemy import Engine

import oncely
from oncely.core import errors
from oncely.core.errors import OncelyError

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTED = sorted(
    {name for page in DOCS for name in re.findall(r"\boncely(?:\.[a-z_]+)+\b", page.read_text())}
)
"""What the docs name and may be a module."""
MADE_HERE = {
    "Inbox",
    "AsyncInbox",
    "JoinedTransaction",
    "Ledger",
    "LedgerMailbox",
    "Mailbox",
    "Work",
}
"""Classes that users are given, and do not make."""
OURS = {
    "Acquire",
    "Case",
    "Held",
    "LedgerCalls",
    "SyncDriver",
    "LedgerObserver",
    "RelayObserver",
    "Suspect",
    "Unclaimed",
    "Write",
}
"""What users never see: how a handler's calls are made; and what `oncely.metrics.Metrics` is."""


def documented_modules() -> Iterator[ModuleType]:
    """Those of the names in the docs that are modules, and need nothing that is not installed."""
    for name in DOCUMENTED:
        try:
            yield importlib.import_module(name)
        except ModuleNotFoundError:
            continue


PUBLIC: dict[str, Any] = {name: getattr(oncely, name) for name in oncely.__all__}
IMPORTABLE = [
    *PUBLIC.values(),
    *(
        each
        for module in documented_modules()
        for name in dir(module)
        if not name.startswith("_") and isinstance(each := getattr(module, name), type)
        if each.__module__ == module.__name__
    ),
]


def callables(name: str, public: Any) -> Iterator[Callable[..., Any]]:
    """The functions that belong to a public name."""
    if not inspect.isclass(public):
        yield from [public] if inspect.isfunction(public) else []
        return
    for member, each in inspect.getmembers(public):
        is_shown = not member.startswith("_") or (member == "__init__" and name not in MADE_HERE)
        function = each.fget if isinstance(each, property) else each
        if is_shown and inspect.isroutine(function) and hasattr(function, "__annotations__"):
            yield function


def ours(annotation: Any) -> Iterator[type]:
    """The classes of this package that an annotation names."""
    for part in (annotation, get_origin(annotation)):
        if isinstance(part, type) and part.__module__.startswith("oncely."):
            yield part
    inner = annotation if isinstance(annotation, list) else get_args(annotation)
    for each in inner:
        yield from ours(each)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "spark"])
def test_signatures(name: str) -> None:
    """Every class of ours in the signatures of a public name is public, too."""
    for function in callables(name, PUBLIC[name]):
        for annotation in get_type_hints(function, localns={"Engine": Engine}).values():
            for kind in ours(annotation):
                where = f"{function.__qualname__}: {kind.__module__}.{kind.__name__}"
                assert kind in IMPORTABLE or kind.__name__ in OURS, where


def test_errors() -> None:
    """Every error that users can meet can be caught by its name."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    met = {kind.__name__ for kind in kinds if issubclass(kind, OncelyError)}
    # The ledger finds out what became of a lost reply.
    assert met - {"ReplyLost"} <= set(oncely.__all__)
