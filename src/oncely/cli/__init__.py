"""The `oncely` command: arguments in, exit codes out."""

import argparse
import os
import sys
from collections.abc import Sequence

from oncely.cli.terminal import shown
from oncely.core.errors import ConfigError, OncelyError, mask_passwords

DONE, FAILURES, WRONG = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0: done; 1: finished with failures; 2: wrong usage or settings."""
    parsed = _parser().parse_args(arguments)
    try:
        return _run(parsed)
    except ConfigError as error:
        print(f"oncely: {mask_passwords(_one_line(error))}", file=sys.stderr)
        return WRONG
    except OncelyError as error:
        print(f"oncely: {mask_passwords(_one_line(error))}", file=sys.stderr)
        return FAILURES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oncely", description="Process every message once, over one ledger."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    pipeline = commands.add_parser("pipeline", help="run a pipeline on Spark")
    actions = pipeline.add_subparsers(title="actions", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="run the pipeline that a TOML file describes")
    run.add_argument("file", metavar="FILE.toml")
    run.add_argument(
        "--ledger",
        metavar="URL",
        default=os.environ.get("ONCELY_LEDGER"),
        help="instead of the file's (default: $ONCELY_LEDGER)",
    )
    run.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _run(parsed: argparse.Namespace) -> int:
    try:
        from oncely.cli.pipeline import run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; type: pip install 'oncely[spark]'"
        ) from error
    return run(parsed.file, parsed.ledger, as_json=parsed.json)


def _one_line(error: Exception) -> str:
    return shown(" ".join(str(error).split()))
