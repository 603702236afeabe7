"""`oncely report`: the dashboard's pages as one file."""

from pathlib import Path
from uuid import uuid4

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName
from oncely.cli.terminal import put_json
from oncely.core.errors import ConfigError, mask_passwords
from oncely.stores.names import TABLE_NAME


@options.command("report", "oncely report --to report.html")
@options.option(
    "--to",
    values.FILE,
    "the file to write; an existing one is replaced",
    metavar="FILE.html",
    required=True,
)
@options.ledger
def report(at: LedgerName, to: str, as_json: bool) -> None:
    """Write the pages of the dashboard to one HTML file."""
    from oncely.web.report import report as pages

    named = Path(to)
    if named.is_dir():
        raise ConfigError(f"--to: {to!r} is a folder; name a file, such as report.html")
    if named.exists() and not named.is_file():
        raise ConfigError(f"--to: {to!r} is not a file; name one, such as report.html")
    if not named.absolute().parent.is_dir():
        raise ConfigError(f"--to: there is no folder {str(named.parent)!r}")
    # What a link points to is replaced, not the link: /dev/stdout is one. The file appears only
    # when it is complete.
    file = Path(to).resolve()
    with opened(at) as ledger:
        found = ops.overview(ledger)
        table = "" if at.table == TABLE_NAME else f", table {at.table}"
        schema = "" if at.schema is None else f", schema {at.schema}"
        name = f"{mask_passwords(at.url or '')}{table}{schema}"
        text = pages(ledger, found, name)
    unfinished = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    if as_json:
        put_json({"file": to, **found.as_dict()})
    else:
        print(f"{to}: {found.verdict}")
