"""The page: plots and numbers in one HTML file that loads nothing."""

from pathlib import Path
from uuid import uuid4

from jinja2 import Environment, PackageLoader, StrictUndefined

from oncely.core.errors import ConfigError
from oncely.core.shown import shown
from oncely.report.plots import moment, plots, span
from oncely.spark.operations.measures import Measures


def check_writable(file: Path) -> None:
    """Raises ConfigError where no page can be written to `file`."""
    if file.is_dir():
        raise ConfigError(f"--to: {str(file)!r} is a folder; name a file, such as report.html")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--to: there is no folder {str(file.parent)!r}")


def write_page(file: Path, measures: Measures, consumer: str | None = None) -> None:
    """Write the page to `file`, there once it is whole. Raises OSError."""
    unfinished = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        unfinished.write_text(page(measures, consumer), encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def page(measures: Measures, consumer: str | None = None) -> str:
    """The page as HTML. What is of others, such as names and ids, is escaped."""
    # Every value is escaped but what is marked safe: the plots, whose texts matplotlib escapes.
    templates = Environment(
        loader=PackageLoader("oncely.report", "."), autoescape=True, undefined=StrictUndefined
    )
    title = "Messages" if consumer is None else f"Messages of {shown(consumer)}"
    return templates.get_template("page.html.jinja").render(
        title=title,
        subtitle=f"What the ledger knew at {moment(measures.at)}. All times are in UTC.",
        numbers=_numbers(measures),
        plots=plots(measures),
        in_doubt=[
            (
                shown(each.consumer),
                shown(each.message_id),
                f"{each.attempts:,}",
                f"{span(each.age_s)} ago",
            )
            for each in measures.in_doubt
        ],
    )


def _numbers(measures: Measures) -> list[tuple[str, str]]:
    def standing(*words: str) -> int:
        return sum(found.get(word, 0) for found in measures.standings.values() for word in words)

    found = {
        "messages": measures.records,
        "completed": standing("completed"),
        "duplicates": measures.duplicates,
        "failed": standing("failed", "exhausted"),
        "in doubt": standing("in_doubt"),
        "in the archive alone": measures.archived,
    }
    return [(word, f"{count:,}") for word, count in found.items()]
