"""`oncely web`: serves the dashboard of a ledger, until it is stopped."""

from typing import Any

from oncely.cli import options, values


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
