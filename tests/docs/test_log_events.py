"""The page of log events names what the sources log."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from logging import makeLogRecord
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import codes, rows

SOURCES = Path(__file__).parents[2] / "src" / "oncely"
LEVELS = {"debug", "info", "warning", "error"}


class Logged(NamedTuple):
    """An event, where it is logged."""

    event: str
    sentence: str
    level: str | None = None
    """None where it is not said there."""
    fields: frozenset[str] = frozenset()
    """As far as they stand there."""


def text_of(node: ast.AST) -> str:
    """A text, without the parts that are filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def items_of(node: ast.AST | None, function: ast.AST) -> Mapping[str, ast.expr]:
    """The items of a mapping, or of the one that was given this name in `function`."""
    found: dict[str, ast.expr] = {}
    if isinstance(node, ast.Name):
        for each in ast.walk(function):
            if isinstance(each, ast.Assign | ast.AnnAssign):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                if node.id in (getattr(target, "id", "") for target in targets):
                    found |= items_of(each.value, function)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            found |= items_of(value, function) if key is None else {text_of(key): value}
    return found


def logged_by(call: ast.Call, function: ast.AST) -> Iterator[Logged]:
    """What a call logs: of a logger, or of an outage that is made."""
    given = {each.arg: each.value for each in call.keywords}
    if "extra" in given and isinstance(call.func, ast.Attribute):
        items = items_of(given["extra"], function)
        if event := text_of(items.get("event", ast.Constant(""))):
            level = {"exception": "error", "log": None}.get(call.func.attr, call.func.attr)
            yield Logged(event, text_of(call.args[0]), level, frozenset(items) - {"event"})
    elif len(call.args) == 5 and getattr(call.args[0], "id", "") == "_log":
        _, begins, sentence, ends, last = map(text_of, call.args)
        level = getattr(given.get("level"), "attr", "warning").lower()
        fields = frozenset(name for name in given if name not in (None, "level"))
        yield Logged(begins, sentence, level, fields | {"error"})
        end = "warning" if level == "error" else level
        yield Logged(ends, last, end, fields | {"away_s"})


@cache
def all_logged() -> list[Logged]:
    found = []
    for file in sorted(SOURCES.rglob("*.py")):
        module = ast.parse(file.read_text())
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
                found += [each for call in calls for each in logged_by(call, function)]
        # Of events that are logged by one call together.
        sentences = items_of(ast.Name("_SENTENCES"), module)
        found += [Logged(event, text_of(sentence)) for event, sentence in sentences.items()]
    return found


def page() -> Mapping[str, list[str]]:
    return {codes(row[0])[0]: row for row in rows("log-events.md")}


def fields_of(event: str) -> set[str]:
    """The fields on the page, also those that it takes from other events there."""
    text = page()[event][2]
    others = [other for other in page() if f"`{other}`" in text]
    return {name for each in [event, *others] for name in codes(page()[each][2])}


def test_events() -> None:
    """Every event that is logged is in the page, once, and none besides."""
    named = [codes(row[0])[0] for row in rows("log-events.md")]
    # The command line writes this one itself.
    assert sorted(named) == sorted({each.event for each in all_logged()} | {"command_failed"})


def test_levels_and_fields() -> None:
    """The page has the levels of an event, every field that stands where it is logged, and those
    that its sentence names.
    """
    levels: dict[str, set[str]] = defaultdict(set)
    for each in all_logged():
        if each.level is not None:
            levels[each.event].add(each.level)
        in_sentence = {*re.findall(r"%\(([a-z_]+)\)", each.sentence)} - {"reason"}
        assert each.fields | in_sentence <= fields_of(each.event), each.event
    for event, found in levels.items():
        assert {level for level in LEVELS if level in page()[event][1]} == found, event


def test_fields_are_not_those_of_records() -> None:
    """`logging` refuses a field that has the name of an attribute of its records."""
    taken = {*vars(makeLogRecord({})), "message", "asctime"}
    assert {name for event in page() for name in fields_of(event)} & taken == set()


def test_sentences() -> None:
    """Each is a sentence, and not the name of the event."""
    for each in all_logged():
        assert not each.sentence or " " in each.sentence, each.event
