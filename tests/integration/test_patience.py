"""A server that is away for a while as a message is handled: nothing runs twice, no try is lost.

The line to the ledger is cut at one request, whose reply is lost, and the server is away for a
while after that, in which no lease ends.
"""

from contextlib import closing
from typing import Any

import pytest
from tests.integration.lines import MESSAGE_ID, REFUSES, Line

from oncely.consumer import Consumer
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import State
from oncely.once import once
from oncely.transports.open_transport import open_transport

pytestmark = pytest.mark.usefixtures("hurried")


def go_away(line: Line) -> None:
    """The reply to the next request about the message is lost, and then the server is away."""
    line.proxy.cut(MESSAGE_ID.encode(), delivers=True, refuses=REFUSES)


def consumed(line: Line, handler: Any, policy: Policy) -> Any:
    """What a consumer reports that had one message."""
    with closing(open_transport("memory://patience")) as transport:
        transport.publish("in", [Message(MESSAGE_ID, b"{}")])
        consumer = Consumer("memory://patience", "in").idempotent(
            line.ledger, "billing", policy=policy
        )
        return consumer.consume(handler, drain=True)


@pytest.mark.parametrize("hold", [False, True])
def test_claim(line: Line, *, hold: bool) -> None:
    """The claim is stored and its reply lost: whoever asks again is granted the same one."""
    handled: list[str] = []
    go_away(line)
    policy = Policy(lease="2m", tries=1, on_in_doubt="hold" if hold else "retry")
    report = consumed(line, lambda message: handled.append(message.id), policy)
    assert handled == [MESSAGE_ID]
    assert (report.handled, report.retried, report.dead_lettered) == (1, 0, 0)
    assert (line.stored().state, line.stored().attempts) == (State.COMPLETED, 1)


def test_completion(line: Line) -> None:
    """The end of a handler is said again until the server is back."""
    handled: list[str] = []

    def handle(message: Message) -> None:
        handled.append(message.id)
        go_away(line)

    report = consumed(line, handle, Policy(lease="2m", tries=1))
    assert (handled, report.handled, report.dead_lettered) == ([MESSAGE_ID], 1, 0)
    assert line.stored().state is State.COMPLETED


def test_step(line: Line) -> None:
    """A step that has had its effect is kept, however long that takes: it never runs again."""
    debits: list[str] = []

    def debit() -> str:
        debits.append("debit")
        go_away(line)
        return "receipt"

    @once(line.ledger, consumer="billing", key=lambda message: message.id, lease="2m")
    def handle(message: Message) -> str:
        return str(message.step("debit", debit))

    assert handle(Message(MESSAGE_ID)) == "receipt"
    assert handle(Message(MESSAGE_ID)) is None
    assert (debits, line.stored().attempts) == (["debit"], 1)


def test_once(line: Line) -> None:
    """A function's end is said again, too: the next call is a duplicate, and not in doubt."""
    runs: list[str] = []

    @once(line.ledger, consumer="billing", key=lambda id_: id_, lease="2m", keep_result=True)
    def charge(id_: str) -> str:
        runs.append(id_)
        go_away(line)
        return "charged"

    assert [charge(MESSAGE_ID), charge(MESSAGE_ID)] == ["charged", "charged"]
    assert runs == [MESSAGE_ID]
