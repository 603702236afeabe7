"""A debit whose log cannot be written: the message comes again, the money is taken once.

The bank takes the money, then the log fails, and so the message is delivered again. Without steps
the second delivery would take the money a second time. Run it: `python debit.py`; the folder `out`
holds the bank's own account of what it was asked for.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import oncely

OUT = Path(__file__).parent / "out"
BANK = OUT / "bank.jsonl"
LOG = OUT / "log" / "debits.txt"


def debit(account: str, amount: int, idempotency_key: str) -> dict[str, str]:
    """Ask the bank, which does what it is asked, each time that it is asked."""
    with BANK.open("a") as bank:
        asked = {"account": account, "amount": amount, "idempotency_key": idempotency_key}
        bank.write(json.dumps(asked) + "\n")
    return {"receipt": f"{account}-{amount}"}


def write_log(line: str) -> None:
    """Append a line to the log, whose folder has to exist."""
    with LOG.open("a") as log:
        log.write(line + "\n")


def handler(ledger: oncely.Ledger) -> Callable[[oncely.Message], dict[str, str]]:
    """What is to happen once for each message."""

    @oncely.once(ledger, consumer="debits", key=lambda message: message.id, keep_result=True)
    def handle(message: oncely.Message) -> dict[str, str]:
        account, amount = message.get("account"), message.get("amount")
        # Finished once, it is not run again; the key lets a bank that knows it refuse a copy even
        # where a crash comes between its answer and our note of it.
        receipt = message.step("debit", debit, account, amount, message.step_key("debit"))
        write_log(f"{message.id}: took {amount} from {account}")
        return receipt

    return handle


def deliveries() -> Iterator[oncely.Message]:
    """What the broker brings: the message again and again, as nobody acknowledged it in time."""
    for _ in range(4):
        yield oncely.Message("order-17", b'{"account": "alice", "amount": 99}')


def main() -> None:
    """Deliver the message four times; mend the log after the second."""
    OUT.mkdir(exist_ok=True)
    ledger = oncely.open_ledger(f"sqlite:///{OUT / 'ledger.db'}")
    ledger.migrate()
    handle = handler(ledger)
    for number, message in enumerate(deliveries(), start=1):
        if number == 3:
            LOG.parent.mkdir(exist_ok=True)
        try:
            print(f"delivery {number}: {handle(message)}")
        except OSError as error:
            print(f"delivery {number}: failed: {error.strerror}")
    print(f"the bank was asked {len(BANK.read_text().splitlines())} time(s)")


if __name__ == "__main__":
    main()
