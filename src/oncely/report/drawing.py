"""How plots are drawn: matplotlib to SVG that stands in a page and takes the page's colours."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType


class Colour(StrEnum):
    """Colours that most colour-blind people tell apart. The page says what each is there, under
    its name, so that they are legible in light and dark.
    """

    INK = "#101112"
    FAINT = "#131415"
    BLUE = "#0072b2"
    ORANGE = "#e69f00"
    GREEN = "#009e73"
    RED = "#d55e00"
    GREY = "#8a8f98"
    TEAL = "#56b4e9"


_STYLE: "dict[RcKeyType, Any]" = {
    # Text stays text: it can be read aloud, found and copied.
    "svg.fonttype": "none",
    "svg.hashsalt": "oncely",
    # A consumer's name is no formula, whatever dollars are in it.
    "text.parse_math": False,
    "text.color": Colour.INK,
    "axes.edgecolor": Colour.FAINT,
    "axes.labelcolor": Colour.INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid.axis": "y",
    "xtick.color": Colour.INK,
    "ytick.color": Colour.INK,
    "grid.color": Colour.FAINT,
    "grid.linewidth": 0.6,
    "font.size": 11,
    "legend.frameon": False,
}
_WIDTH, _HEIGHT = 8.0, 3.4
_DAY_S = 86_400
_ID = re.compile(r' id="[a-z]+[0-9_]*_[0-9]+"')
_PROLOG = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


def draw(paint: Callable[[Axes], None], height: float = _HEIGHT) -> str:
    """What `paint` puts on a pair of axes, as an <svg> element; a legend stands above it."""
    with rc_context(_STYLE), warnings.catch_warnings():
        # A browser has letters that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        paint(axes)
        handles, names = axes.get_legend_handles_labels()
        if len(names) > 1:
            figure.legend(handles, names, loc="outside upper left", ncols=3)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True)
    svg = _METADATA.sub("", _PROLOG.sub("", drawn.getvalue()))
    for colour in Colour:
        svg = svg.replace(colour, f"var(--{colour.name.lower()})")
    # The ids of parts are the same in every plot of the page.
    return _ID.sub("", svg)


def bars(axes: Axes, counts: Sequence[int], colour: str) -> None:
    """A bar for each count, at 0, 1, and so on, with the count on it."""
    drawn = axes.bar(range(len(counts)), counts, color=colour, width=0.8)
    axes.bar_label(drawn, [f"{count:,}" if count else "" for count in counts], fontsize=9)
    count_axis(axes)


def count_axis(axes: Axes) -> None:
    """The y axis for whole numbers from 0."""
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axes.grid(visible=True, axis="y")


def lying_bars(
    axes: Axes, labels: Sequence[str], parts: Sequence[tuple[str, str, Sequence[float]]]
) -> None:
    """A bar for each label, from the top down; `parts` (name, colour, lengths) one after the
    other.
    """
    places = range(len(labels))
    begin = [0.0] * len(labels)
    for name, colour, lengths in parts:
        axes.barh(places, lengths, left=begin, color=colour, label=name, height=0.7)
        begin = [left + length for left, length in zip(begin, lengths, strict=True)]
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")


def steps(
    axes: Axes,
    begins: Sequence[float],
    step_s: float,
    parts: Sequence[tuple[str, str, Sequence[int]]],
) -> None:
    """A bar for each step of time, `parts` (name, colour, counts) one on the other.

    `begins` are seconds since 1970, and are shown in UTC.
    """
    # In days since 1970, as matplotlib has points in time.
    days = [begin / _DAY_S for begin in begins]
    width = 0.9 * step_s / _DAY_S
    bottom = [0] * len(days)
    for name, colour, counts in parts:
        axes.bar(days, counts, width, bottom, align="edge", color=colour, label=name)
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    count_axis(axes)
    locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, tz=UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(formatter)


def height_of(lying: int) -> float:
    """How high a plot with so many lying bars is, in inches."""
    return 1.5 + 0.36 * lying
