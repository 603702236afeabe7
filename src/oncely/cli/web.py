"""`oncely web`: serves the dashboard of a ledger, until it is stopped."""

from typing import Any, NamedTuple

import click

from oncely.cli import options, values
from oncely.cli.options import LedgerName


class WebOptions(NamedTuple):
    """What was typed."""

    ledger: LedgerName
    host: str
    port: int
    root_path: str
    user_header: str | None
    trusted_proxy: tuple[str, ...]
    operator: tuple[str, ...]
    probe: tuple[tuple[str, str], ...]
    json: bool


@click.command("web", epilog=options.example("oncely web --ledger sqlite:///ledger.db --port 8471"))
@click.option(
    "--host",
    metavar="HOST",
    default="127.0.0.1",
    help="where; 127.0.0.1 can be reached by this machine only",
)
@click.option(
    "--port", type=values.port(8470), default=8470, help="the port, or 0 for any that is free"
)
@click.option(
    "--root-path",
    type=values.ROOT_PATH,
    default="/",
    help="the path below which a proxy serves it, such as /oncely",
)
@click.option(
    "--user-header",
    metavar="NAME",
    help="instead of asking for a token, believe the name that a proxy writes into this header, "
    "such as X-Forwarded-User",
)
@click.option(
    "--trusted-proxy",
    metavar="ADDRESS",
    multiple=True,
    help="an address or network of the proxy whose --user-header and X-Forwarded-Proto are "
    "believed; may be repeated  [default: this machine]",
)
@click.option(
    "--operator",
    metavar="USER",
    multiple=True,
    help="who of those may decide, * for all; may be repeated",
)
@click.option(
    "--probe",
    type=values.PROBE,
    metavar="CONSUMER=module:function",
    multiple=True,
    help="the function that operators may ask about this consumer's messages in doubt; may be "
    "repeated",
)
@options.ledger
def web(at: LedgerName, as_json: bool, **typed: Any) -> None:
    """Serve a dashboard: what is stuck, why, and what operators decide about it."""
    from oncely.cli.web_command import serve

    serve(WebOptions(ledger=at, json=as_json, **typed))
