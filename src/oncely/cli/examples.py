"""An example of each command, which its help ends with, and the reference of the command line."""

from collections.abc import Mapping

EXAMPLES: Mapping[str, str] = {
    "oncely init": "oncely init webhooks --delivery webhook --store postgresql",
    "oncely migrate": "oncely migrate --ledger sqlite:///ledger.db",
    "oncely completion": "oncely completion bash > ~/.oncely-completion",
    "oncely consume": "oncely consume app:consumer --workers 4 --metrics-port 9464",
    "oncely relay": "oncely relay --ledger env:LEDGER_URL --transport env:BROKER_URL",
    "oncely pipeline run": "oncely pipeline run pipeline.toml --drain",
    "oncely status": "oncely status --watch 5",
    "oncely list": "oncely list --state failed --consumer billing --older-than 1h",
    "oncely show": "oncely show order-17 --consumer billing",
    "oncely waiting": "oncely waiting --consumer billing --json",
    "oncely report": "oncely report --to report.html",
    "oncely reconcile": "oncely reconcile pipeline.toml --to differences",
    "oncely dead list": "oncely dead list --consumer billing --sort newest",
    "oncely dead show": "oncely dead show 42",
    "oncely dead retry": "oncely dead retry --all --consumer billing --why 'the bank is back'",
    "oncely dead edit": "oncely dead edit 42 --body order.json --why 'wrong amount'",
    "oncely dead export": "oncely dead export dead.jsonl --consumer billing",
    "oncely dead discard": "oncely dead discard 42 43 --why 'test messages'",
    "oncely reset": "oncely reset --consumer billing --state failed --why 'fixed in 2.1'",
    "oncely forget": "oncely forget order-17 --consumer billing --why 'sent by mistake'",
    "oncely bindings list": "oncely bindings list app:consumer",
    "oncely bindings prune": "oncely bindings prune app:consumer --yes",
    "oncely check": "oncely check --replay-window 7d --broker-timeout 30m",
    "oncely purge": "oncely purge --older-than 30d --retention billing=90d",
    "oncely archive": "oncely archive --to s3://bucket/ledger",
}
"""By what is typed to name the command."""
