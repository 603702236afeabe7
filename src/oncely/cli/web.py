"""`oncely web` serves the dashboard of a ledger until it is stopped; `oncely report` writes it to
one file.
"""

from pathlib import Path
from typing import Any
from uuid import uuid4

from oncely import ops
from oncely.cli import options, values
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName
from oncely.cli.terminal import put_json
from oncely.core.errors import ConfigError, mask_passwords
from oncely.stores.names import TABLE_NAME


@options.command("web", "oncely web --ledger sqlite:///ledger.db --port 8471")
@options.option(
    "--host", "HOST", "where; 127.0.0.1 can be reached by this machine only", default="127.0.0.1"
)
@options.option("--port", values.port(8470), "the port, or 0 for any that is free", default=8470)
@options.option(
    "--root-path",
    values.ROOT_PATH,
    "the path below which a proxy serves it, such as /oncely",
    default="/",
)
@options.option(
    "--user-header",
    "NAME",
    "instead of asking for a token, believe the name that a proxy writes into this header, "
    "such as X-Forwarded-User",
)
@options.option(
    "--trusted-proxy",
    "ADDRESS",
    "an address or network of the proxy whose --user-header and X-Forwarded-Proto are believed; "
    "may be repeated  [default: this machine]",
    multiple=True,
)
@options.option(
    "--operator", "USER", "who of those may decide, * for all; may be repeated", multiple=True
)
@options.option(
    "--probe",
    values.PROBE,
    "the function that operators may ask about this consumer's messages in doubt; may be repeated",
    metavar="CONSUMER=module:function",
    multiple=True,
)
@options.ledger
def web(**typed: Any) -> None:
    """Serve a dashboard: what is stuck, why, and what operators decide about it."""
    from oncely.cli.web_command import serve

    serve(**typed)


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
