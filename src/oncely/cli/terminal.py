"""What commands print and ask: JSON and tables, all in one style, on stdout; lines, questions and
progress on stderr.

rich is imported when it is needed: the help of the commands needs none.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from oncely.core.errors import ConfigError, RefusedError, mask_passwords
from oncely.core.errors_by_kind import Kinds, commonest, headline
from oncely.core.shown import shown, span

if TYPE_CHECKING:
    from rich.table import Column, Table
    from rich.text import Text

    from oncely.ops import Changed

_LINE_EVERY_S = 5.0
_ENDLESS = 100_000
_FOLDED, _CUT = 8, 12
"""The least width of a column that is folded, and of one that gives way where that is enough."""
_LONGEST = 200
_MOST_ERRORS = 5
_LOUD: Mapping[str, str] = {
    "failed": "red",
    "exhausted": "red",
    "dead": "red",
    "in doubt": "yellow",
    "waits for its sender": "yellow",
}

Cell: TypeAlias = Union[str, int, "Text", None]
"""A text is printed as it is, and "-" where there is none; a number with its thousands."""


def put_json(found: object) -> None:
    """The answer of a command with --json, in one line on stdout."""
    print(json.dumps(found))


def say(text: str) -> None:
    """A line on stderr: stdout may be read by a program."""
    print(shown(text), file=sys.stderr, flush=True)


def tell_audit(error: str | None) -> None:
    """Say where the counts of a change are not in the audit."""
    if error is not None:
        say(f"oncely: done, but the audit does not say how many were changed: {error}")


def tell_changed(changed: "Changed[int]", done: str, what: str, *, as_json: bool) -> None:
    """Report a change of messages that were named by their numbers; `what` is the word for one.
    Raises RefusedError where some are not there.
    """
    if as_json:
        put_json(
            {
                done.replace(" ", "_"): changed.done,
                "next": changed.next_steps,
                "missing": changed.missing,
                "by": changed.by,
                "why": changed.why,
                "audit_error": changed.audit_error,
            }
        )
    else:
        print(f"{done}: {len(changed.done):,}")
        for step, count in Counter(changed.next_steps.values()).items():
            print(shown(f"{count:,} {step}" if len(changed.done) > 1 else step))
    tell_audit(changed.audit_error)
    if changed.missing:
        raise RefusedError(f"there is no {what} {', '.join(map(str, changed.missing))}")


def agreed(what: str) -> bool:
    """Ask at the terminal whether to do that. Raises ConfigError if stdin is not a terminal."""
    what = shown(what)
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}? not a terminal: add --yes to confirm")
    print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in {"y", "yes"}:
        return True
    say("nothing was changed")
    return False


class Progress:
    """One line that changes in place on a terminal; elsewhere a line now and then.

    `first`, if given, is shown at once. If `is_quiet`, nothing is shown: each line on stderr is
    for a program.
    """

    def __init__(self, first: str = "", *, is_quiet: bool = False) -> None:
        from rich.console import Console

        self._first = first
        self._is_quiet = is_quiet
        self._console = Console(stderr=True)
        self._began = self._said_at = time.monotonic()
        self._status = self._console.status(first)

    def __enter__(self) -> "Progress":
        if self._is_quiet:
            return self
        if self._console.is_terminal:
            self._status.start()
        elif self._first:
            print(self._first, file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    @property
    def took_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def show(self, text: str) -> None:
        """Show where the work stands."""
        from rich.text import Text

        now = time.monotonic()
        if self._is_quiet:
            return
        if self._console.is_terminal:
            # As text: a consumer's name is not markup.
            self._status.update(Text(shown(text)))
        elif now - self._said_at >= _LINE_EVERY_S:
            self._said_at = now
            print(shown(text), file=sys.stderr, flush=True)

    def counter(self, total: int) -> Callable[[int], None]:
        """A function that shows how many of `total` are done."""
        return lambda done: self.show(f"{done:,} of {total:,}")


# ---- Tables ------------------------------------------------------------------------------------


def table_of(
    columns: Iterable["Column | str"], rows: Iterable[Sequence[Cell]], *, show_header: bool = True
) -> "Table":
    """A table of these rows. A column that is only named is one of texts, which are shown in
    full.
    """
    from rich import box
    from rich.table import Column, Table

    table = Table(
        *(Column(each, overflow="fold") if isinstance(each, str) else each for each in columns),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        show_header=show_header,
    )
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


def unbroken(name: str = "") -> "Column":
    """A column of texts in one line each."""
    from rich.table import Column

    return Column(name, no_wrap=True)


def aligned(name: str = "") -> "Column":
    """A column of numbers, or of times."""
    from rich.table import Column

    return Column(name, justify="right", no_wrap=True)


def put_counts(counts: Mapping[str, int], errors: Kinds | None = None, *, as_json: bool) -> None:
    """Print a row for each count, under its name in words, and for each of the commonest errors."""
    found = commonest(errors or {})
    if as_json:
        put_json({**counts} if errors is None else {**counts, "errors": found})
    else:
        put(fields_table({**totals(counts), **error_rows(found)}, aligned()))


def totals(counts: Mapping[str, Any]) -> dict[str, int]:
    """Counts by their names in words: those that are counted by kind as their sums."""
    return {
        words(name): sum(each.values()) if isinstance(each, Mapping) else each
        for name, each in counts.items()
        if name not in ("seconds", "errors")
    }


def error_rows(found: Sequence[Mapping[str, Any]]) -> dict[str, Cell]:
    """Rows of the commonest errors, which JSON has in this form."""
    return {each["text"]: each["count"] for each in found[:_MOST_ERRORS]}


def fields_table(fields: Mapping[str, Cell], values: "Column | str" = "") -> "Table":
    """A row for each field; `values` is their column, if it is not one of texts."""
    return table_of((unbroken(), values), fields.items(), show_header=False)


def consumers_table(
    names: Sequence[str], consumers: Mapping[str, Sequence[Cell]], total: Sequence[Cell]
) -> "Table":
    """A row for each consumer, and the total; `names` are those of the columns."""
    rows = ((consumer, *cells) for consumer, cells in consumers.items())
    table = table_of(("consumer", *map(aligned, names)), rows)
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


def cut_error(text: str | None) -> "Text":
    """As `cut`, of an error: the line that a person needs first, passwords masked."""
    return cut(text and mask_passwords(headline(text)))


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
    none: str = "",
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
