"""The plots of a report: each with its words, its picture, and the same numbers as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from oncely.core.shown import shown
from oncely.report import drawing
from oncely.report.drawing import Colour
from oncely.spark.operations.measures import EDGES_S, MOST_ATTEMPTS, Measures, Spread

_MOST_CONSUMERS = 20
_LONGEST_NAME = 32
_STANDINGS = (
    ("completed", "completed", Colour.GREEN),
    ("handled", "handled, messages to send", Colour.TEAL),
    ("held", "processing", Colour.BLUE),
    ("in_doubt", "in doubt", Colour.ORANGE),
    ("failed", "failed, to be tried again", Colour.GREY),
    ("exhausted", "failed permanently", Colour.RED),
)
_UNITS_S = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of the page."""

    name: str
    title: str
    says: str
    """What is drawn, and what it leaves out."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """What is drawn, as a table."""
    svg: str | None
    """None where there is nothing to draw."""


def plots(measures: Measures) -> list[Plot]:
    """All plots, in the order of the page."""
    return [
        _over_time(measures),
        _distance(measures),
        _attempts(measures),
        _handling(measures),
        _states(measures),
        _in_doubt(measures),
    ]


def span(length_s: float) -> str:
    """A length of time in the largest unit that it fills: "90 s", "3.5 h"."""
    if length_s < 1:
        return f"{length_s * 1_000:.3g} ms"
    unit, unit_s = next((unit, size) for unit, size in _UNITS_S if length_s >= size)
    return f"{length_s / unit_s:.3g} {unit}"


def moment(at: float) -> str:
    """A point in time."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


# ---- Over time ---------------------------------------------------------------------------------


def _over_time(measures: Measures) -> Plot:
    moments = measures.over_time
    step = span(measures.step_s)

    def paint(axes: Axes) -> None:
        drawing.steps(
            axes,
            [each.at for each in moments],
            measures.step_s,
            [
                ("messages", Colour.BLUE, [each.messages for each in moments]),
                ("duplicates", Colour.ORANGE, [each.duplicates for each in moments]),
            ],
        )
        axes.set_xlabel("time, UTC")
        axes.set_ylabel(f"deliveries per {step.removeprefix('1 ')}")

    return Plot(
        "over-time",
        "Messages and duplicates over time",
        f"Messages when they were first seen, in steps of {step}. The duplicates of a message "
        "stand where the last of them came; they are counted once it is completed.",
        ("from", "messages", "duplicates"),
        [(moment(m.at), f"{m.messages:,}", f"{m.duplicates:,}") for m in moments],
        drawing.draw(paint) if moments else None,
    )


# ---- Lengths of time ---------------------------------------------------------------------------


def _distance(measures: Measures) -> Plot:
    return _spread_plot(
        "distance",
        "Duplicate distance",
        "How long after the first delivery of a message its last duplicate came. Retention has to "
        "be longer than the longest, or the duplicate would be handled again.",
        measures.distance,
        "first delivery to last duplicate",
        Colour.ORANGE,
    )


def _handling(measures: Measures) -> Plot:
    return _spread_plot(
        "handling",
        "Handling time",
        "From the first claim to completion, with retries and the waiting between them. Of "
        "completed messages that no duplicate came of: a duplicate renews the time of the record.",
        measures.handling,
        "first claim to completion",
        Colour.GREEN,
    )


def _spread_plot(
    name: str, title: str, says: str, spread: Spread | None, axis: str, colour: str
) -> Plot:
    labels = _classes()
    if spread is None:
        return Plot(name, title, says, (axis, "messages"), [], None)

    def paint(axes: Axes) -> None:
        drawing.bars(axes, spread.counts, colour)
        # Between the bars, where the classes meet.
        axes.set_xticks(
            [place + 0.5 for place in range(len(EDGES_S))], [span(s) for s in EDGES_S], fontsize=10
        )
        axes.set_xlabel(axis)
        axes.set_ylabel("messages")

    found = (
        f" Median {span(spread.median_s)}, 95% within {span(spread.p95_s)}, "
        f"longest {span(spread.longest_s)}."
    )
    rows = [(label, f"{count:,}") for label, count in zip(labels, spread.counts, strict=True)]
    return Plot(name, title, says + found, (axis, "messages"), rows, drawing.draw(paint))


def _classes() -> list[str]:
    between = [f"{span(low)} to {span(high)}" for low, high in pairwise(EDGES_S)]
    return [f"below {span(EDGES_S[0])}", *between, f"{span(EDGES_S[-1])} or more"]


# ---- Attempts ----------------------------------------------------------------------------------


def _attempts(measures: Measures) -> Plot:
    counts = measures.attempts
    last = max((number for number, count in enumerate(counts) if count), default=0)
    end = max(last, 3) + 1
    # A record without an attempt was reset, and has not run since.
    first = 0 if counts[0] else 1
    labels = [str(number) for number in range(first, end)]
    if end > MOST_ATTEMPTS:
        labels[-1] += " or more"

    def paint(axes: Axes) -> None:
        drawing.bars(axes, counts[first:end], Colour.BLUE)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlabel("attempts")
        axes.set_ylabel("messages")

    return Plot(
        "attempts",
        "Attempts",
        "How often the handler of a message was started, also where it never came to an end.",
        ("attempts", "messages"),
        [(label, f"{n:,}") for label, n in zip(labels, counts[first:end], strict=True)],
        drawing.draw(paint) if measures.records else None,
    )


# ---- Consumers ---------------------------------------------------------------------------------


def _states(measures: Measures) -> Plot:
    found = list(measures.standings.items())
    drawn = found[:_MOST_CONSUMERS]
    parts = [
        (word, colour, [float(counts.get(standing, 0)) for _, counts in drawn])
        for standing, word, colour in _STANDINGS
    ]

    def paint(axes: Axes) -> None:
        drawing.lying_bars(
            axes, [_short(name) for name, _ in drawn], [part for part in parts if any(part[2])]
        )
        totals = [f" {sum(counts.values()):,}" for _, counts in drawn]
        axes.bar_label(axes.containers[-1], totals, fontsize=9)  # type: ignore[arg-type]
        axes.set_xlabel("messages")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))

    left_out = len(found) - len(drawn)
    return Plot(
        "states",
        "States per consumer",
        "Where the records of each consumer stand."
        + (f" The {left_out:,} with the fewest are in the table alone." if left_out else ""),
        ("consumer", *(word for _, word, _ in _STANDINGS)),
        [
            (shown(name), *(f"{counts.get(standing, 0):,}" for standing, _, _ in _STANDINGS))
            for name, counts in found
        ],
        drawing.draw(paint, drawing.height_of(len(drawn))) if drawn else None,
    )


def _in_doubt(measures: Measures) -> Plot:
    oldest = measures.oldest_in_doubt
    drawn = oldest[:_MOST_CONSUMERS]
    longest_s = max((each.age_s for each in drawn), default=0.0)
    unit, unit_s = next((u for u in _UNITS_S if longest_s >= u[1]), _UNITS_S[-1])

    def paint(axes: Axes) -> None:
        ages = [each.age_s / unit_s for each in drawn]
        labels = [_short(each.consumer) for each in drawn]
        drawing.lying_bars(axes, labels, [("oldest", Colour.ORANGE, ages)])
        axes.bar_label(
            axes.containers[0],  # type: ignore[arg-type]
            [f" {span(each.age_s)}, {each.records:,} in doubt" for each in drawn],
            fontsize=9,
        )
        axes.set_xlim(right=1.35 * max(ages))
        axes.set_xlabel(f"age of the oldest, {unit}")

    return Plot(
        "in-doubt",
        "Oldest in doubt",
        "A claim ran out, and nobody knows whether the effect happened. How long ago the one that "
        "was not seen for longest was last seen, for each consumer.",
        ("consumer", "in doubt", "age of the oldest"),
        [(shown(each.consumer), f"{each.records:,}", span(each.age_s)) for each in oldest],
        drawing.draw(paint, drawing.height_of(len(drawn))) if drawn else None,
    )


def _short(name: str) -> str:
    name = shown(name)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
