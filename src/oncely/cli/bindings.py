"""`oncely bindings list` and `prune`: the bindings of a consumer's queue."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.table import Table

from oncely import ops
from oncely.cli.changes import agreed, login_name, tell_audit
from oncely.cli.ledger_arguments import check_transport_file
from oncely.cli.loading import loaded_consumer
from oncely.cli.tables import cell, folded, new_table, put
from oncely.consumer import Consumer
from oncely.core.binding import Binding
from oncely.core.shown import shown
from oncely.locations import check_shared_transport
from oncely.transports.transport import Transport


class _Found(NamedTuple):
    consumer: Consumer
    transport: Transport
    bindings: ops.FoundBindings


def list_bindings(parsed: argparse.Namespace) -> int:
    """Print each binding of the consumer's queue, and whether a handler needs it."""
    with _found(parsed) as (consumer, _, found):
        queue = consumer.queue
    if parsed.json:
        print(json.dumps(_as_dict(queue, found)))
        return 0
    if found.needed or found.unneeded:
        put(_table(found))
    else:
        print(shown(f"no bindings of queue {queue!r}"), file=sys.stderr)
    for topic in found.missing:
        print(shown(f"not bound yet: {topic!r}; start the consumer"), file=sys.stderr)
    return 0


def prune(parsed: argparse.Namespace) -> int:
    """Remove the bindings that no handler needs; return 1 if the user answers no."""
    with _found(parsed) as (consumer, transport, found):
        gone = ops.unneeded_bindings(found)
        has_agreed = not gone or parsed.yes or agreed(_question(consumer.queue, gone))
        pruned = gone if has_agreed else []
        by = parsed.by or login_name()
        error = ops.prune_bindings(transport, pruned, consumer.ledger, by=by, why=parsed.why)
    tell_audit(error)
    if parsed.json:
        told = [binding._asdict() for binding in pruned]
        print(json.dumps({"pruned": told, "audit_error": error}))
    elif not gone:
        print("nothing to prune", file=sys.stderr)
    else:
        for binding in pruned:
            print(shown(f"pruned {_named(binding)}"))
    return int(not has_agreed)


@contextmanager
def _found(parsed: argparse.Namespace) -> Iterator[_Found]:
    with loaded_consumer(parsed, only_look=True) as consumer:
        if consumer.url is not None:
            check_transport_file(check_shared_transport(consumer.url))
        with consumer.opened() as transport:
            found = ops.bindings(transport, consumer.queue, consumer.topics, consumer.ledger)
            yield _Found(consumer, transport, found)


def _question(queue: str, gone: Sequence[Binding]) -> str:
    return f"remove from queue {queue!r}: {', '.join(map(_named, gone))}"


def _named(binding: Binding) -> str:
    exchange = f" of exchange {binding.exchange!r}" if binding.exchange else ""
    return f"{binding.pattern!r}{exchange}"


def _table(found: ops.FoundBindings) -> Table:
    table = new_table(folded("type"), folded("exchange"), "needed")
    for binding in sorted([*found.needed, *found.unneeded]):
        is_needed = binding in found.needed
        table.add_row(
            cell(binding.pattern), cell(binding.exchange or "-"), "yes" if is_needed else "no"
        )
    return table


def _as_dict(queue: str, found: ops.FoundBindings) -> dict[str, Any]:
    each = sorted([*found.needed, *found.unneeded])
    bindings = [{**binding._asdict(), "needed": binding in found.needed} for binding in each]
    return {"queue": queue, "bindings": bindings, "missing": found.missing}
