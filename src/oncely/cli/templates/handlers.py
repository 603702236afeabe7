"""The handler of pipeline.toml: it is called once for each order, in Spark's tasks."""

from pathlib import Path

import oncely

CHARGED = Path(__file__).with_name("charged.txt")


def charge(message: oncely.Message) -> None:
    """What must not happen twice. If it raises, the message is retried."""
    with CHARGED.open("a") as file:
        file.write(f"{message.id}: {message.get('amount')}\n")
