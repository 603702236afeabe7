"""Tables of the commands, all in one style.

rich is imported when a table is made: the help of the commands needs none.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from oncely.cli.terminal import put_json, say
from oncely.core.shown import shown, span

if TYPE_CHECKING:
    from rich.table import Column, Table
    from rich.text import Text

_ENDLESS = 100_000
_FOLDED, _CUT = 8, 12
"""The least width of a column that is folded, and of one that gives way where that is enough."""
_LONGEST = 200
_LOUD: Mapping[str, str] = {
    "failed": "red",
    "exhausted": "red",
    "dead": "red",
    "in doubt": "yellow",
}

Cell: TypeAlias = Union[str, int, "Text", None]
"""A text is printed as it is, and "-" where there is none; a number with its thousands."""


def new_table(*columns: "Column | str", show_header: bool = True) -> "Table":
    """A table without rows yet."""
    from rich import box
    from rich.table import Table

    return Table(
        *columns,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        show_header=show_header,
    )


def table_of(columns: Iterable["Column | str"], rows: Iterable[Sequence[Cell]]) -> "Table":
    """A table of these rows."""
    table = new_table(*columns)
    for row in rows:
        table.add_row(*map(_cell_of, row))
    return table


def _cell_of(value: Cell) -> "str | Text":
    match value:
        case None | "":
            return "-"
        case str():
            return cell(value)
        case int():
            return f"{value:,}"
        case _:
            return value


def folded(name: str = "") -> "Column":
    """A column of texts that are shown in full."""
    return _column(name, overflow="fold")


def unbroken(name: str = "") -> "Column":
    """A column of texts in one line each."""
    return _column(name, no_wrap=True)


def aligned(name: str = "") -> "Column":
    """A column of numbers, or of times."""
    return _column(name, justify="right", no_wrap=True)


def _column(name: str, **how: Any) -> "Column":
    from rich.table import Column

    return Column(name, **how)


def put_counts(counts: Mapping[str, int], *, as_json: bool) -> None:
    """Print a row for each count, under its name in words."""
    if as_json:
        put_json(counts)
    else:
        put(fields_table({words(name): count for name, count in counts.items()}, aligned()))


def fields_table(fields: Mapping[str, Cell], values: "Column | None" = None) -> "Table":
    """A row for each field; `values` is their column, if it is not one of texts."""
    table = new_table(unbroken(), values or folded(), show_header=False)
    for name, value in fields.items():
        table.add_row(name, _cell_of(value))
    return table


def consumers_table(
    names: Sequence[str], consumers: Mapping[str, Sequence[Cell]], total: Sequence[Cell]
) -> "Table":
    """A row for each consumer, and the total; `names` are those of the columns."""
    table = new_table(folded("consumer"), *map(aligned, names))
    for consumer, cells in consumers.items():
        table.add_row(*map(_cell_of, (consumer, *cells)))
    table.add_section()
    table.add_row("total", *map(_cell_of, total))
    return table


def words(name: str) -> str:
    """The name of a field, for people."""
    return name.replace("_", " ")


def loud(text: str, word: str) -> "Text":
    """`text`, coloured if `word` is a state that needs attention; not coloured in a pipe."""
    return _text(text, style=_LOUD.get(word, ""))


def cell(text: str) -> "Text":
    """Text of others, printed as it is: markup and escape sequences have no effect."""
    return _text(shown(text), overflow="fold")


def lines(text: str) -> "Text":
    """As `cell`, for text that may have several lines."""
    return _text("\n".join(map(shown, text.split("\n"))), overflow="fold")


def cut(text: str | None) -> "Text":
    """As `cell`, for text that may be long: in one line, cut if there is not enough room."""
    if text is not None and len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 1]}…"
    return _text("-" if text is None else shown(text), no_wrap=True, overflow="ellipsis")


def _text(text: str, **how: Any) -> "Text":
    from rich.text import Text

    return Text(text, **how)


def ago(at: float, now: float) -> str:
    """How long ago that was."""
    return f"{span(now - at)} ago"


def more_than(limit: int, *, more: bool) -> str | None:
    """What to say where there are more rows than the limit."""
    return f"the first {limit:,}; there are more, see --limit" if more else None


def put_found(
    columns: Iterable["Column | str"],
    rows: Iterable[Sequence[Cell]],
    none: str,
    more: str | None = None,
) -> None:
    """Print a table of what was found, whose last column gives way; `none` where nothing was, and
    `more` below where there is more.
    """
    table = table_of(columns, rows)
    if not table.rows:
        say(none)
        return
    put(table, last_gives_way=True)
    if more is not None:
        say(more)


def put(table: "Table", *, last_gives_way: bool = False) -> None:
    """Print a table on stdout: as wide as the terminal, and in a pipe as wide as it gets.

    Where `last_gives_way`, the last column is cut to what the others leave. If that does not help,
    texts are folded. Lines that are too long even so are left to the terminal: nothing is left out.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A line for each row, so that grep and its like find whole ids.
        console.width = _ENDLESS
    endless = console.options.update(max_width=_ENDLESS)
    texts = [column for column in table.columns if not column.no_wrap]
    for column in texts:
        column.max_width = _FOLDED
    console.width = max(console.width, console.measure(table, options=endless).maximum)
    for column in texts:
        column.max_width = None
    if last_gives_way:
        last = table.columns[-1]
        last.max_width = _CUT
        spare = console.width - console.measure(table, options=endless).maximum
        last.max_width = _CUT + max(spare, 0)
    console.print(table)
