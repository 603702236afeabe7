"""An SMS that leaves before its event can be published: the message comes again, the SMS does not.

For each customer a message says: send an SMS. The gateway sends it, then the event "sms.sent" is to
be published, and the line to the broker times out. So the handler fails, and its message is
delivered again. Three consumers meet that. Run it: `python sms.py`; the file `out/gateway.jsonl` is
the gateway's own account of what it was asked for.
"""

import argparse
import json
import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import oncely
from oncely.transports.transport import Transport

OUT = Path(__file__).parent / "out"
GATEWAY = OUT / "gateway.jsonl"
QUEUE, EVENTS = "example-sms", "example-sms-sent"
CUSTOMERS = ["+49 151 0001", "+49 151 0002", "+49 151 0003", "+49 151 0004"]

Handler = Callable[[oncely.Message], None]


# ---- What handlers do ----------------------------------------------------------------------------


def send_sms(message: oncely.Message) -> None:
    """Ask the gateway, which does what it is asked, each time that it is asked."""
    with GATEWAY.open("a") as gateway:
        gateway.write(json.dumps({"to": message.get("to"), "message": message.id}) + "\n")


def event_of(message: oncely.Message) -> oncely.Message:
    """What others are to be told when the SMS has left."""
    return oncely.Message(f"{message.id}/sent", message.body, "sms.sent")


class Line:
    """A handler's own line to the broker: each event times out when it is published first."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tried: set[str] = set()

    def publish(self, event: oncely.Message) -> None:
        """Put the event into its queue, or raise TimeoutError."""
        if event.id not in self._tried:
            self._tried.add(event.id)
            raise TimeoutError("the broker does not answer")
        self._transport.publish(EVENTS, [event])


# ---- Three consumers -----------------------------------------------------------------------------


def consumers(
    transport: Transport, ledger: oncely.Ledger
) -> Mapping[str, tuple[oncely.Consumer, Handler]]:
    """Each by its name, with its handler."""
    line = Line(transport)

    def send_and_publish(message: oncely.Message) -> None:
        send_sms(message)
        line.publish(event_of(message))

    def send_and_defer(message: oncely.Message) -> None:
        send_sms(message)
        # Stored together with the note that the SMS has left, and published from there.
        message.send(EVENTS, event_of(message))

    def consumer() -> oncely.Consumer:
        return oncely.Consumer(transport, QUEUE).events("sms.send").backoff(0.1)

    def careful() -> oncely.Consumer:
        return consumer().idempotent(ledger, "sms-service", policy=oncely.at_most_once())

    return {
        "without oncely": (consumer(), send_and_publish),
        "at most once": (careful(), send_and_publish),
        "event deferred": (careful(), send_and_defer),
    }


# ---- What comes of it ----------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a consumer has done: for each customer so many SMS, and so many events."""

    deliveries: int
    smses: list[int]
    events: list[int]


def run(transport: Transport, consumer: oncely.Consumer, handler: Handler) -> Outcome:
    """Publish a message for each customer, and let them be consumed; what came of it."""
    run_id = uuid.uuid4().hex
    messages = [
        oncely.Message(f"{run_id}/{number}", json.dumps({"to": to}).encode(), "sms.send")
        for number, to in enumerate(CUSTOMERS)
    ]
    transport.publish(QUEUE, messages)
    report = consumer.consume(handler, drain=True)
    sent = [json.loads(line)["message"] for line in GATEWAY.read_text().splitlines()]
    published = events_in(transport)
    return Outcome(
        report.received,
        [sent.count(each.id) for each in messages],
        [published.count(event_of(each).id) for each in messages],
    )


def events_in(transport: Transport) -> list[str]:
    """The ids of the events that were published, which are taken out of their queue."""
    ids: list[str] = []
    oncely.Consumer(transport, EVENTS).consume(lambda event: ids.append(event.id), drain=True)
    return ids


def show(outcomes: Mapping[str, Outcome]) -> None:
    """A row for each customer, a column for each consumer."""
    rows = [["", *outcomes], ["deliveries", *(str(each.deliveries) for each in outcomes.values())]]
    for number, customer in enumerate(CUSTOMERS):
        cells = (
            ["SMS"] * each.smses[number] + ["event"] * each.events[number]
            for each in outcomes.values()
        )
        rows.append([customer, *map(" ".join, cells)])
    for row in rows:
        print("".join(f"{cell:<18}" for cell in row).rstrip())


def main() -> None:
    """Run all three, on the servers that are named, or in the folder `out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", default=f"sqlite:///{OUT / 'queue.db'}", metavar="URL")
    parser.add_argument("--ledger", default=f"sqlite:///{OUT / 'ledger.db'}", metavar="URL")
    arguments = parser.parse_args()
    # The failures here are meant: the table tells of them.
    logging.getLogger("oncely").setLevel(logging.ERROR)
    OUT.mkdir(exist_ok=True)
    with (
        closing(oncely.open_transport(arguments.transport)) as transport,
        closing(oncely.open_ledger(arguments.ledger)) as ledger,
    ):
        ledger.migrate()
        three = consumers(transport, ledger)
        show({name: run(transport, *each) for name, each in three.items()})


if __name__ == "__main__":
    main()
