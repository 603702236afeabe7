"""`oncely report`: the dashboard's pages as one file."""

import argparse
import json
from pathlib import Path
from uuid import uuid4

from oncely import ops
from oncely.cli.ledger_arguments import opened
from oncely.core.errors import ConfigError, mask_passwords
from oncely.stores.names import TABLE_NAME
from oncely.web.report import report


def run(parsed: argparse.Namespace) -> int:
    """Write the file, which appears only when it is complete."""
    _check_writable(Path(parsed.to))
    # What a link points to is replaced, not the link: /dev/stdout is one.
    to = Path(parsed.to).resolve()
    with opened(parsed) as ledger:
        found = ops.overview(ledger)
        _write(to, report(ledger, found, _place(parsed)))
    if parsed.json:
        print(json.dumps({"file": parsed.to, **found.as_dict()}))
    else:
        print(f"{parsed.to}: {found.verdict}")
    return 0


def _place(parsed: argparse.Namespace) -> str:
    """Which ledger it is, without passwords."""
    table = "" if parsed.table == TABLE_NAME else f", table {parsed.table}"
    schema = "" if parsed.schema is None else f", schema {parsed.schema}"
    return f"{mask_passwords(parsed.ledger)}{table}{schema}"


def _check_writable(file: Path) -> None:
    if file.is_dir():
        raise ConfigError(f"--to: {str(file)!r} is a folder; name a file, such as report.html")
    if file.exists() and not file.is_file():
        raise ConfigError(f"--to: {str(file)!r} is not a file; name one, such as report.html")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--to: there is no folder {str(file.parent)!r}")


def _write(file: Path, text: str) -> None:
    unfinished = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
