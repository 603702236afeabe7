"""`oncely web`: serves the dashboard of a ledger, until it is stopped."""

from typing import Any, NamedTuple

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
def web(at: LedgerName, as_json: bool, **typed: Any) -> None:
    """Serve a dashboard: what is stuck, why, and what operators decide about it."""
    from oncely.cli.web_command import serve

    serve(WebOptions(ledger=at, json=as_json, **typed))
