"""A worker on pika that handles the queue `work`, until it is killed."""

import sys
from pathlib import Path

from tests.integration.adapting import Effects, channel_to

from oncely.adapters.pika import Callback, once_callback
from oncely.core.message import Message
from oncely.core.policy import Finding, Policy
from oncely.ledger.ledger import Ledger, open_ledger


def ledger_in(folder: Path) -> Ledger:
    """The ledger of this worker."""
    return open_ledger(f"sqlite:///{folder}/ledger.db")


def callback_in(folder: Path, ledger: Ledger) -> Callback:
    """Every message has its effect, which is looked for where a message is in doubt."""
    effects = Effects(folder)

    def probe(message: Message) -> Finding:
        return "happened" if effects.count(message.id) else "not_happened"

    policy = Policy(lease="1s", on_in_doubt=probe)
    return once_callback(ledger, "billing", lambda message: effects.add(message.id), policy=policy)


def _main(url: str, folder: Path) -> None:
    with channel_to(url) as channel:
        channel.basic_consume("work", callback_in(folder, ledger_in(folder)))
        channel.start_consuming()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
