"""A job that may be started twice: each customer gets one letter, whatever is run again."""

from pathlib import Path

import oncely

OUT = Path(__file__).parent / "out"
LETTERS = OUT / "letters.txt"
INVOICES = {"invoice-1": "anna", "invoice-2": "ben"}


def main() -> None:
    """Send a letter for each invoice, and say what was sent so far."""
    OUT.mkdir(exist_ok=True)
    ledger = oncely.open_ledger(f"sqlite:///{OUT / 'ledger.db'}")
    ledger.migrate()

    @oncely.once(ledger, consumer="letters", key=lambda invoice, _: invoice)
    def send_letter(invoice: str, customer: str) -> None:
        print(f"sending {invoice} to {customer}")
        with LETTERS.open("a") as letters:
            letters.write(f"{invoice} {customer}\n")

    for invoice, customer in INVOICES.items():
        send_letter(invoice, customer)
    print(f"{len(LETTERS.read_text().splitlines())} letters sent so far")


if __name__ == "__main__":
    main()
