"""The page of log events names what the sources log."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import codes, rows

SOURCES = Path(__file__).parents[2] / "src" / "oncely"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
AWAY = ("unavailable", "available")


class Logged(NamedTuple):
    """A call of a logger."""

    event: str | None
    """None where it is not a text there."""
    level: str
    fields: frozenset[str]
    """As far as they stand there."""


@cache
def modules() -> Mapping[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in sorted(SOURCES.rglob("*.py"))}


def keys_of(node: ast.expr | None, function: ast.AST) -> Iterator[str]:
    """The keys of what is handed over as `extra`, or was given a name just before."""
    if isinstance(node, ast.Name):
        for each in ast.walk(function):
            targets = each.targets if isinstance(each, ast.Assign) else []
            if isinstance(each, ast.AnnAssign):
                targets = [each.target]
            if any(isinstance(to, ast.Name) and to.id == node.id for to in targets):
                assert isinstance(each, ast.Assign | ast.AnnAssign)
                yield from keys_of(each.value, ast.Module([], []))
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield str(key.value)
            elif key is None:
                yield from keys_of(value, function)


def calls_of_loggers() -> Iterator[Logged]:
    for module in modules().values():
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from calls_in(function)


def calls_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Logged]:
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "_log":
            extra = next((each.value for each in node.keywords if each.arg == "extra"), None)
            level = node.func.attr
            assert level in LEVELS or level == "log", level
            place = 1 if level == "log" else 0
            level = {"exception": "error", "log": ""}.get(level, level)
            event = node.args[place]
            text = event.value if isinstance(event, ast.Constant) else None
            assert text is None or isinstance(text, str)
            yield Logged(text, level, frozenset(keys_of(extra, function)))


def handed_over() -> Iterator[str]:
    """The events that are given, as a text, to a function with a parameter `event: str`."""
    for file, module in modules().items():
        for function in ast.walk(module):
            if not isinstance(function, ast.FunctionDef):
                continue
            parameters = [*function.args.posonlyargs, *function.args.args]
            names = [each.arg for each in parameters if each.arg != "self"]
            if "event" not in names:
                continue
            annotation = parameters[-len(names) + names.index("event")].annotation
            if isinstance(annotation, ast.Name) and annotation.id == "str":
                yield from given_to(file, function.name, names.index("event"))


def given_to(file: Path, name: str, place: int) -> Iterator[str]:
    here = {file: modules()[file]}
    # A callback is called elsewhere.
    yield from [*texts(here, name, place)] or [*texts(modules(), name, place)]


def texts(where: Mapping[Path, ast.Module], name: str, place: int) -> Iterator[str]:
    for module in where.values():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and len(node.args) > place:
                called = node.func
                by = called.attr if isinstance(called, ast.Attribute) else ""
                by = called.id if isinstance(called, ast.Name) else by
                argument = node.args[place]
                text = argument.value if isinstance(argument, ast.Constant) else None
                if by.strip("_") == name.strip("_") and isinstance(text, str):
                    yield text


def outages() -> Iterator[str]:
    """The events of whatever may be away."""
    for module in modules().values():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Outage":
                what = node.args[0]
                assert isinstance(what, ast.Constant)
                assert isinstance(what.value, str)
                yield from (f"{what.value}_{each}" for each in AWAY)


def test_events() -> None:
    """Every event that is logged is in the page, once, and none besides."""
    plain = {call.event for call in calls_of_loggers() if call.event is not None}
    named = [codes(row[0])[0] for row in rows("log-events.md")]
    assert sorted(named) == sorted({*plain, *handed_over(), *outages()})


def test_levels_and_fields() -> None:
    """The page has the levels of an event, and every field that stands where it is logged."""
    told: dict[str, list[str]] = {codes(row[0])[0]: row for row in rows("log-events.md")}
    levels: dict[str, set[str]] = defaultdict(set)
    fields: dict[str, set[str]] = defaultdict(set)
    for call in calls_of_loggers():
        if call.event is not None:
            levels[call.event].add(call.level)
            fields[call.event] |= call.fields
    for event, found in levels.items():
        said = told[event][1]
        assert {level for level in LEVELS if level in said} == found, event
        text = told[event][2]
        as_other = [other for other in told if f"`{other}`" in text and other != event]
        shown = {name for each in [event, *as_other] for name in codes(told[each][2])}
        assert fields[event] <= shown, event
