"""Pages as HTML: everything is escaped, and what is not printable is written out."""

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from oncely.core.errors_by_kind import headline
from oncely.core.shown import moment, shown, span

STATIC = Path(__file__).with_name("static")
_SHOWN = 20_000
"""Characters of a body or a traceback."""
_CUT = 160
"""Characters of an error in a list."""
_SHORT_NAME, _LONG_NAME = 20, 40
_HEAD = re.compile(r'<th scope="col"[^>]*>(.*?)</th>')
_CELL = re.compile(r'<tr|<td(?! colspan)|<th scope="row"')


@cache
def environment() -> Environment:
    """The templates, and what they can use."""
    made = Environment(
        loader=PackageLoader("oncely.web"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "cut": _cut,
        "name": _name,
        "headline": lambda error: _cut(error and headline(error)),
        "labelled": _labelled,
        "json": lambda value: json.dumps(value, ensure_ascii=False),
        "lines": _lines,
        # For a field that is sent back: escaped, and nothing else.
        "as_it_is": escape,
        "number": lambda count: f"{count:,}",
        "hour": lambda at: f"{datetime.fromtimestamp(at, UTC):%H:%M}",
        "counted": lambda count, word: f"{count:,} {word}{'' if count == 1 else 's'}",
        "span": span,
        "took": lambda seconds: "-" if seconds is None else f"{seconds:g} s",
        "total": _total,
        "slug": lambda word: word.replace(" ", "-"),
    }
    made.globals |= {"moment": _moment, "version": _version}
    return made


def render(template: str, context: dict[str, Any]) -> str:
    """A template with its values."""
    return environment().get_template(template).render(context)


def _finalize(value: Any) -> Any:
    """Whatever a template puts out: text of others cannot turn a line around, nor hide."""
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _cut(text: str | None) -> str:
    if not text:
        return "-"
    return text if len(text) <= _CUT else f"{text[: _CUT - 1]}…"


def _name(text: str) -> str:
    """A name in a table: one that is not short may be broken between its words, and only one that
    is long within a word, too.
    """
    if len(text) <= _SHORT_NAME:
        return text
    parts = Markup("<wbr>").join(re.split(r"(?<=[./_:@])", shown(text)))
    return Markup('<span class="long">{}</span>').format(parts) if len(text) > _LONG_NAME else parts


def _labelled(rows: Markup) -> Markup:
    """The same rows of a table, where each cell has the word above its column: a narrow screen has
    room for one column. Text of others is escaped by now: a tag in it is not one.
    """
    words = _HEAD.findall(rows)
    column = 0

    def label(tag: re.Match[str]) -> str:
        nonlocal column
        if tag[0] == "<tr":
            column = 0
            return tag[0]
        column += 1
        return f'{tag[0]} data-label="{words[column - 1]}"'

    return Markup(_CELL.sub(label, rows))  # noqa: S704


def _total(totals: Mapping[str, Any], name: str) -> str:
    """A count of a run; one that is kept by reasons is added up."""
    found = totals.get(name)
    if found is None:
        return "-"
    return f"{sum(found.values()) if isinstance(found, dict) else found:,}"


def _lines(text: str) -> Markup:
    """Of several lines; of one that is too long, its beginning."""
    kept = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return Markup("\n").join(escape(shown(line)) for line in kept.split("\n"))


def _moment(at: float, now: float) -> Markup:
    """A point in time for people and for programs."""
    try:
        exact = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError):
        return escape(moment(at, now))
    day, _, off = moment(at, now).partition(" (")
    text = Markup('<time datetime="{}"><span>{}</span> <span>({}</span></time>')
    return text.format(exact, day, off)


@cache
def _version(file: str) -> str:
    """Changes with a file's content, so that browsers may keep it for ever."""
    return hashlib.sha256((STATIC / file).read_bytes()).hexdigest()[:12]
