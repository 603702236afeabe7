"""What brings events into a consumer's queue, and what of it no handler needs any more."""

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from oncely.core.binding import Binding
from oncely.core.errors import ConfigError
from oncely.ledger import Ledger
from oncely.transports.transport import Transport

_log = logging.getLogger(__name__)


class FoundBindings(NamedTuple):
    """The bindings of a queue, as its consumer sees them."""

    needed: Sequence[Binding]
    unneeded: Sequence[Binding]
    """They bring what no handler takes, or what others bring as well."""
    missing: Sequence[str]
    """Topics of the consumer by which its queue is not bound: it has not started with them yet."""


def bindings(
    transport: Transport, queue: str, topics: Collection[str], ledger: Ledger | None = None
) -> FoundBindings:
    """By what events come into a queue, and which of that a consumer of these topics needs: where
    there are none it takes whatever comes, and needs all.

    Of a broker that does not tell, it is what consumers with this ledger have bound, and nothing
    that others have. Raises ConfigError where the ledger is not in SQL, and remembers nothing.
    """
    found = transport.bindings(queue)
    if found is None and ledger is not None and ledger.is_shared:
        found = ledger.mailbox.bindings(queue)
    if found is None:
        raise ConfigError(
            f"nothing remembers the bindings of queue {queue!r}: the broker does not tell them, "
            "and the consumer has no ledger in SQL; type: rabbitmqctl list_bindings"
        )
    exchange = transport.features.exchange
    wanted = {Binding(queue, exchange, topic) for topic in topics}
    missing = sorted(binding.pattern for binding in wanted - {*found})
    needed = [binding for binding in found if not wanted or binding in wanted]
    return FoundBindings(needed, [each for each in found if each not in needed], missing)


def unneeded_bindings(found: FoundBindings) -> Sequence[Binding]:
    """Those that can be pruned. Raises ConfigError where that is too early: what is not needed may
    bring what those would that are missing.
    """
    if found.missing:
        raise ConfigError(
            f"the queue is not bound by {found.missing[0]!r} yet, which the consumer needs; start "
            "this version of it, and prune when no older one runs"
        )
    return found.unneeded


def prune_bindings(
    transport: Transport, bindings: Collection[Binding], ledger: Ledger | None = None
) -> None:
    """Let nothing more come into queues by these, and remember them no more; safe to repeat.

    What has come already stays in the queue.
    """
    transport.unsubscribe(bindings)
    if ledger is not None:
        # Last: what is remembered can be pruned again.
        ledger.mailbox.unbind(bindings)
    for binding in bindings:
        _log.info("binding_pruned", extra=binding._asdict())
