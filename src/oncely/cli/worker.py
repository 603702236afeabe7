"""`oncely worker`: what people know of a worker that the ledger does not."""

from typing import TYPE_CHECKING

import click

from oncely import ops
from oncely.cli import options
from oncely.cli.changes import told
from oncely.cli.options import Note
from oncely.core.shown import shown

if TYPE_CHECKING:
    from oncely.ledger.ledger import Ledger

_NEXT = (
    "in doubt now: under on_in_doubt = retry, a message runs again when a worker of its consumer "
    "takes it from the ledger, or its sender delivers it again; under hold: oncely settle"
)


@click.group("worker", cls=options.Commands, no_args_is_help=False)
def worker() -> None:
    """Say that a worker is dead; `oncely workers` lists them."""


@options.command("dead", "oncely worker dead shop-2:4711 --why 'its node is gone'", worker)
@click.argument("name", metavar="HOST:PID", help="the worker, as oncely workers shows it")
@options.sure
@options.note
@options.open_ledger
def dead(ledger: "Ledger", name: str, is_sure: bool, note: Note, as_json: bool) -> int:
    """End the claims of a worker that is dead, at once, and not with their leases. What it may
    still write is refused.
    """
    changed = ops.worker_dead(ledger, name, is_sure=is_sure, **note)
    code = told(changed, "ended", as_json=as_json)
    if not as_json:
        print(_NEXT if changed.done else shown(f"{name} held no claims"))
    return code
