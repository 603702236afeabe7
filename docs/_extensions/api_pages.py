"""Sphinx extension: how the API pages show signatures and docstrings."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import stringify_annotation

import oncely

_PACKAGES = ("oncely", "oncely.http", "oncely.middleware", "oncely.spark", "oncely.web")
_ALIASES = ("ClaimOutcome", "WriteOutcome", "Probe", "Finding", "Duration", "Id")
"""Types with a name of their own, which signatures show by it; what holds another comes first."""
_GIVEN = frozenset(
    {
        *("AsyncInbox", "HttpRequest", "Inbox", "JoinedTransaction", "Ledger", "LedgerMailbox"),
        *("Mailbox", "RequestState", "Work"),
    }
)
"""Classes that users are given, and do not make: how is nothing to them."""
_CONSTANT = re.compile(r"(?<== )_?[A-Z][A-Z_]+\b|(?<==)_?[A-Z][A-Z_]+\b")
_UNSHOWABLE = re.compile(r"<factory>|<function [\w.]+(?:<lambda>)?>")
_FIELD = re.compile(r"Alias for field number \d+")


def _public_names() -> Iterator[tuple[str, str]]:
    """Where a class is defined, and under which name users know it."""
    for package in _PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            yield f"{getattr(value, '__module__', '')}.{name}", f"{package}.{name}"


def _link_public_name(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Annotations name a class by its module; its page has it under its public name."""
    public = _PUBLIC.get(node.get("reftarget", ""))
    if public is None:
        return None
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, "obj", public, node, content
    )


def _signature(
    _: Sphinx, what: str, name: str, value: Any, __: Any, text: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """A signature as users would write it."""
    if what == "class" and _is_given(name, value):
        return "", None
    namespace = getattr(_function_of(value), "__globals__", {})
    return _readable(text, namespace), _readable(returned, namespace)


def _is_given(name: str, value: Any) -> bool:
    is_made_by_nobody = getattr(value, "_is_protocol", False) or inspect.isabstract(value)
    is_enum = inspect.isclass(value) and issubclass(value, Enum)
    return is_made_by_nobody or is_enum or name.rpartition(".")[2] in _GIVEN


def _function_of(value: Any) -> Any:
    return inspect.unwrap(value.__init__ if inspect.isclass(value) else value)


def _readable(text: str | None, namespace: dict[str, Any]) -> str | None:
    if not text:
        return text

    def shown(found: re.Match[str]) -> str:
        value = namespace.get(found[0])
        return repr(value) if isinstance(value, str | int | float) else found[0]

    text = _UNSHOWABLE.sub("...", _CONSTANT.sub(shown, text))
    for name, annotation in _WRITTEN:
        text = text.replace(annotation, f"~oncely.{name}")
    return text


def _docstring(_: Sphinx, what: str, name: str, __: Any, ___: Any, lines: list[str]) -> None:
    """A docstring; that of a type's name is taken from where it is defined."""
    if _FIELD.fullmatch("".join(lines).strip()):
        lines.clear()
    if what == "data":
        lines[:] = _alias_docstring(name.rpartition(".")[2])


def _alias_docstring(name: str) -> list[str]:
    modules = [module for module in sorted(sys.modules) if module.startswith("oncely.")]
    for module in modules:
        # A namespace or a compiled module has no source.
        if getattr(sys.modules[module], "__file__", None):
            found = ModuleAnalyzer.for_module(module)
            found.analyze()
            if ("", name) in found.attr_docs:
                return list(found.attr_docs["", name])
    return []


_PUBLIC = dict(_public_names())
_WRITTEN = [(name, stringify_annotation(getattr(oncely, name), "smart")) for name in _ALIASES]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("missing-reference", _link_public_name)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
