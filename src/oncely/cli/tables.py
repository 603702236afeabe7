"""Tables of the commands, in one look."""

import os

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oncely.core.shown import shown

_ENDLESS = 100_000
_NARROW = 12


def new_table(*, show_header: bool = True) -> Table:
    """A table without columns yet."""
    return Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        show_header=show_header,
    )


def cell(text: str) -> Text:
    """What others have written, as it stands: neither markup nor an escape sequence counts."""
    return Text(shown(text), overflow="fold")


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
