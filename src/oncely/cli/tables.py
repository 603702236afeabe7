"""Tables of the commands, in one look."""

import os
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from oncely.cli.terminal import shortened
from oncely.core.shown import shown

_ENDLESS = 100_000
_NARROW = 12
_LOUD: Mapping[str, str] = {
    "failed": "red",
    "exhausted": "red",
    "dead": "red",
    "in doubt": "yellow",
}

Cell = str | Text


def new_table(*columns: Column | str, show_header: bool = True) -> Table:
    """A table without rows yet."""
    return Table(
        *columns,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        show_header=show_header,
    )


def folded(name: str = "") -> Column:
    """A column of texts that are shown in full."""
    return Column(name, overflow="fold")


def aligned(name: str = "") -> Column:
    """A column of numbers, or of times."""
    return Column(name, justify="right", no_wrap=True)


def counts_table(counts: Mapping[str, int]) -> Table:
    """A row for each count, under its name in words."""
    table = new_table("", aligned(), show_header=False)
    for name, count in counts.items():
        table.add_row(words(name), f"{count:,}")
    return table


def fields_table(fields: Mapping[str, Cell]) -> Table:
    """A row for each field."""
    table = new_table(Column(no_wrap=True), folded(), show_header=False)
    for name, value in fields.items():
        table.add_row(name, cell(value) if isinstance(value, str) else value)
    return table


def consumers_table(
    names: Sequence[str], consumers: Mapping[str, Sequence[Cell]], total: Sequence[Cell]
) -> Table:
    """A row for each consumer, and the total; `names` are those of the columns."""
    table = new_table(folded("consumer"), *map(aligned, names))
    for consumer, cells in consumers.items():
        table.add_row(cell(consumer), *cells)
    table.add_section()
    table.add_row("total", *total)
    return table


def words(name: str) -> str:
    """The name of a field, for people."""
    return name.replace("_", " ")


def loud(text: str, word: str) -> Text:
    """What stands in a state, in the colour of those that people are to see; none in a pipe."""
    return Text(text, style=_LOUD.get(word, ""))


def cell(text: str) -> Text:
    """What others have written, as it stands: neither markup nor an escape sequence counts."""
    return Text(shown(text), overflow="fold")


def lines(text: str) -> Text:
    """As `cell`, of what may have several lines."""
    return Text("\n".join(map(shown, text.split("\n"))), overflow="fold")


def cut(text: str) -> Text:
    """As `cell`, of what may be long: in one line, cut where there is no room."""
    return Text(shortened(text), no_wrap=True, overflow="ellipsis")


def put(table: Table, *, last_gives_way: bool = False) -> None:
    """Print a table on stdout: as wide as the terminal, and in a pipe as wide as it gets.

    Where `last_gives_way`, the last column is cut before any other is folded.
    """
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A line for each row, so that grep and its like find whole ids.
        console.width = _ENDLESS
    if last_gives_way:
        last = table.columns[-1]
        last.max_width = _NARROW
        endless = console.options.update(max_width=_ENDLESS)
        spare = console.width - console.measure(table, options=endless).maximum
        last.max_width = _NARROW + max(spare, 0)
    console.print(table)
