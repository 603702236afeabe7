"""The bindings by which events come into a consumer's queue, and those that no handler needs."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from oncely._util.event_log import EventLog
from oncely.core.binding import Binding
from oncely.core.errors import ConfigError
from oncely.core.record import Key
from oncely.ledger import Ledger
from oncely.ops.auditing import Note, audited
from oncely.transports.transport import Transport

_log = EventLog(__name__)


class FoundBindings(NamedTuple):
    """The bindings of a queue, as its consumer sees them."""

    needed: Sequence[Binding]
    unneeded: Sequence[Binding]
    """They bring events that no handler takes, or that other bindings bring as well."""
    missing: Sequence[str]
    """Topics of the consumer that its queue is not bound to: it has not started with them yet."""


def bindings(
    transport: Transport, queue: str, topics: Collection[str], ledger: Ledger | None = None
) -> FoundBindings:
    """The bindings of a queue, and which of them a consumer of these topics needs: one without
    topics takes whatever comes, and needs all.

    Where the broker does not list bindings, these are the ones that consumers with this ledger have
    made, and no others. Raises ConfigError where the ledger is not in SQL, and keeps none.
    """
    found = transport.bindings(queue)
    if found is None and ledger is not None and ledger.is_shared:
        found = ledger.mailbox.bindings(queue)
    if found is None:
        raise ConfigError(
            f"the bindings of queue {queue!r} are not known: the broker does not list them, and "
            "the consumer has no ledger in SQL; type: rabbitmqctl list_bindings"
        )
    exchange = transport.features.exchange
    wanted = {Binding(queue, exchange, topic) for topic in topics}
    missing = sorted(binding.pattern for binding in wanted - {*found})
    needed = [binding for binding in found if not wanted or binding in wanted]
    return FoundBindings(needed, [each for each in found if each not in needed], missing)


def unneeded_bindings(found: FoundBindings) -> Sequence[Binding]:
    """The bindings that can be pruned. Raises ConfigError where that is too early: until a missing
    binding is made, its events may come by one that is not needed.
    """
    if found.missing:
        raise ConfigError(
            f"the queue is not bound to {found.missing[0]!r} yet, which the consumer needs; start "
            "this version of the consumer, and prune when no older version runs"
        )
    return found.unneeded


def prune_bindings(
    transport: Transport,
    bindings: Collection[Binding],
    ledger: Ledger | None = None,
    *,
    by: str,
    why: str = "",
) -> str | None:
    """Remove these bindings, from the broker and from the ledger; safe to repeat. Return why their
    count is not in the ledger's audit, where it could not be kept there.

    Messages that have come by them stay in the queue.
    """
    if not bindings:
        return None
    if ledger is None:
        _remove(transport, bindings, None)
        return None
    queue = Key("", next(iter(bindings)).queue)
    note = Note.of(by, why)
    with audited(ledger, "bindings_pruned", note, queue, len(bindings)) as tally:
        _remove(transport, bindings, ledger)
        tally.changed = len(bindings)
    return tally.audit_error


def _remove(transport: Transport, bindings: Collection[Binding], ledger: Ledger | None) -> None:
    transport.unsubscribe(bindings)
    if ledger is not None:
        # Last: a binding that the ledger still has can be pruned again.
        ledger.mailbox.unbind(bindings)
    for binding in bindings:
        _log.info(
            "the binding of queue '%(queue)s' to '%(pattern)s' of '%(exchange)s' is removed",
            extra={"event": "binding_pruned", **binding._asdict()},
        )
