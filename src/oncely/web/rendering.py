"""Pages as HTML: everything is escaped, and what is not printable is written out. Charts are SVG,
drawn here: no script, and no colour that is not the style sheet's.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
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
_WIDTH, _HEIGHT = 100.0, 6.0
_TALL = 40.0
_WORD = 14.0
"""So much of its axis a word takes at most, that of a telephone."""
_LABELLED = 4
"""Of so many hours one has its time below the chart: six in a day, on a telephone too."""
_LEAST = 1.5
"""What is there at all is wide enough to be seen: three in doubt of a million."""
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
    made.globals |= {"moment": _moment, "bar": bar, "chart": chart, "version": _version}
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


def bar(counts: Mapping[str, int]) -> Markup:
    """A bar with a part for each count, in its order; what it shows is said in words, too."""
    shown = {word: count for word, count in counts.items() if count}
    said = ", ".join(f"{count:,} {word}" for word, count in shown.items()) or "nothing"
    total = sum(shown.values())
    wide = {word: max(count / total * _WIDTH, _LEAST) for word, count in shown.items()}
    parts, left = [], 0.0
    for word, share in wide.items():
        width = share * _WIDTH / sum(wide.values())
        parts.append(_rect(word, left, 0, width, _HEIGHT))
        left += width
    svg = Markup(
        '<svg class="bar" role="img" aria-label="{}" viewBox="0 0 {:g} {:g}" '
        'preserveAspectRatio="none"><title>{}</title>{}</svg>'
    )
    return svg.format(said, _WIDTH, _HEIGHT, said, Markup("").join(parts))


def _rect(word: str, x: float, y: float, width: float, height: float) -> Markup:
    rect = Markup('<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>')
    return rect.format(word.replace(" ", "-"), x, y, width, height)


def chart(series: Mapping[str, Sequence[int]], hours: Sequence[str], said: str) -> Markup:
    """A column for each hour, one series above another, beside an axis of values; one that is
    touched says its numbers. `said` says all of it in words.
    """
    totals = [sum(counts) for counts in zip(*series.values(), strict=True)]
    top = _round_up(max(totals, default=0))
    values = Markup("").join(Markup("<span>{}</span>").format(f"{n:,}") for n in (top, top // 2, 0))
    plot = Markup("")
    for index, hour in enumerate(hours):
        counts = {word: numbers[index] for word, numbers in series.items()}
        told = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
        plot += Markup(
            '<span class="column" tabindex="-1"><svg viewBox="0 0 1 {:g}" '
            'preserveAspectRatio="none">{}</svg><span class="told">{}: {}</span></span>'
        ).format(_TALL, _stacked(counts, top), hour, told or "nothing")
    return Markup(
        '<div class="chart" role="img" aria-label="{}"><span class="values">{}</span>'
        '<span class="plot">{}</span>{}</div>'
    ).format(said, values, plot, _axis(hours))


def _stacked(counts: Mapping[str, int], top: int) -> Markup:
    parts, at = Markup(""), _TALL
    for word, count in counts.items():
        height = count / top * _TALL
        at -= height
        if count:
            parts += _rect(word, 0, at, 1, height)
    return parts


def _round_up(tallest: int) -> int:
    """The end of an axis whose half is a whole number, too."""
    digits: int = 10 ** max(0, len(str(tallest)) - 1)
    return next(n for n in (2, 4, 6, 10, 20) if n * digits >= tallest) * digits


def _axis(hours: Sequence[str]) -> Markup:
    """The hours that have room, each from the left of its column on. A picture of its own: that of
    the columns is stretched to the width of the screen, and letters would be, too.
    """
    parts = []
    for index, hour in enumerate(hours):
        at = index / len(hours) * _WIDTH
        if int(hour.partition(":")[0]) % _LABELLED or at > _WIDTH - _WORD:
            continue
        mark = Markup('<line x1="{0}%" x2="{0}%" y1="0" y2="4"/>').format(f"{at:.2f}")
        text = Markup('<text x="{}%" y="17">{}</text>')
        parts.append(mark + text.format(f"{at:.2f}", hour))
    svg = Markup('<svg class="axis" aria-hidden="true">{}</svg>')
    return svg.format(Markup("").join(parts))
