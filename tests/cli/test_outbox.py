"""Messages to be sent, by destination: listed, sent again, discarded; and queues of the ledger."""

import json
import re

import pytest
from tests.cli.conftest import Command, OnFile

from oncely import Key, Message, State, ops
from oncely.core.waiting import WaitingMessage


def test_status(sending: OnFile, command: Command) -> None:
    """Each destination with what waits and what was refused, and why."""
    told = json.loads(command("outbox", "status", "--json").out)
    mails, texts = told["destinations"]
    assert (mails["destination"], mails["waiting"], mails["refused"]) == ("mails", 0, 1)
    assert mails["reason"].startswith("too large: xxx")
    assert (texts["destination"], texts["waiting"], texts["reason"]) == ("texts", 1, None)
    assert told["more"] is False
    lines = command("outbox", "status").out.splitlines()
    assert lines[2].split()[:3] == ["mails", "0", "1"]
    assert ops.unsent(sending.ledger, most=0).more


def test_list(sending: OnFile, command: Command) -> None:
    """What waits or, where that is asked for, what was refused; of one destination, or of all."""
    assert sending.ledger.can_defer
    [waits] = json.loads(command("outbox", "list", "--json").out)["messages"]
    assert (waits["destination"], waits["own_id"], waits["is_refused"]) == (
        "texts",
        "receipt-1",
        False,
    )
    [refused] = json.loads(command("outbox", "list", "--refused", "--json").out)["messages"]
    assert (refused["destination"], refused["message_id"]) == ("mails", "order-9")
    none = command("outbox", "list", "--destination", "mails")
    assert none == (0, "", "nothing waits to be sent; refused ones: --refused\n")
    none = command("outbox", "list", "--destination", "texts", "--refused")
    assert none == (0, "", "nothing was refused\n")
    [message] = ops.refused_numbered(sending.ledger, [refused["id"]])
    assert message.destination == "mails"


_NO_RELAY = "no relay is running: start one"


def test_retry(sending: OnFile, command: Command) -> None:
    """What was refused waits anew, its attempts from zero; what waits already is left alone."""
    [waits] = ops.unsent_messages(sending.ledger).messages
    [refused] = ops.unsent_messages(sending.ledger, is_refused=True).messages
    ids = [str(refused.number), str(waits.number)]
    ran = command("outbox", "retry", *ids, "--by", "ann", "--why", "split")
    assert (ran.code, ran.out) == (1, f"retried: 1\n{_NO_RELAY}\n")
    assert f"there is no refused message {waits.number}" in ran.err
    both = ops.unsent_messages(sending.ledger).messages
    assert {each.destination: each.attempts for each in both} == {"mails": 0, "texts": 0}
    [entry] = sending.ledger.operations.audit()
    assert (entry.action, entry.message_id) == ("unsent_retried", "order-9")
    assert (entry.by, entry.changed, entry.refused, entry.why) == ("ann", 1, 1, "split")


@pytest.mark.parametrize("is_last", [False, True])
def test_discard(sending: OnFile, command: Command, is_last: bool) -> None:
    """What is discarded is not sent; once the others are sent, its message is completed."""
    ledger, key = sending.ledger, Key("shop", "order-9")
    [refused] = ops.unsent_messages(ledger, is_refused=True).messages

    def discard() -> None:
        assert command("outbox", "discard", str(refused.number)).code == 0

    def send() -> None:
        ledger.mailbox.sent(ledger.mailbox.take(1, "1s"))

    states = []
    for step in (send, discard) if is_last else (discard, send):
        step()
        record = ledger.find(key)
        states.append(record and record.state)
    assert states == [State.HANDLED, State.COMPLETED]
    assert [entry.action for entry in ledger.operations.audit()] == ["unsent_discarded"]


def test_queue(at: OnFile, command: Command) -> None:
    """What waits in a queue of the ledger."""
    none = "nothing waits in queue 'in'; the queues with messages: oncely status\n"
    assert command("queue", "in").err == none
    rows = WaitingMessage.queued("in", [Message("a", type="t"), Message("b")])
    at.ledger.mailbox.keep(rows)
    ran = command("queue", "in", "--json", "--limit", "1")
    told = json.loads(ran.out)
    assert ([each["own_id"] for each in told["messages"]], told["more"]) == (["a"], True)
    listed = command("queue", "in")
    assert listed.out.splitlines()[2].split()[1:4] == ["a", "-", "t"]
    assert listed.err == "", "they can be taken now"
    assert len(at.ledger.mailbox.take(2, "10m", queue=rows[0].queue)) == 2
    assert re.search(
        r"visibility timeout ends: the first in (9|10) min", command("queue", "in").err
    )
