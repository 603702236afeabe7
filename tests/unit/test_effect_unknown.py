"""A handler that has its effect, and then raises an error after which nobody knows that."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection
from tests.logs import events_in
from tests.unit.conftest import Queue, Sql
from tests.unit.test_consumer_transactional import INSERT

from oncely.consumer import Consumer
from oncely.core.errors import InDoubtError
from oncely.core.message import Message
from oncely.core.policy import effectively_once
from oncely.core.record import Key, State
from oncely.once import once

HOLD = effectively_once(backoff="10ms", tries=3)
NAMES = [str(number) for number in range(5)]


class Bank:
    """Pays each order; of number 3 no answer comes."""

    def __init__(self) -> None:
        self.paid: list[str] = []

    def __call__(self, message: Message, link: Connection | None = None) -> None:
        if link is not None:
            link.execute(INSERT, {"name": message.id})
        self.paid.append(message.id)
        if message.id == "3":
            raise TimeoutError("no answer")

    def all(self, messages: Sequence[Message], link: Connection) -> None:
        for message in messages:
            self(message, link)


def in_doubt(sql: Sql) -> list[str]:
    found = sql.ledger.scan("billing", State.PROCESSING, lease_over=True)
    return [record.key.message_id for record in found]


def test_once_in_a_transaction(sql: Sql) -> None:
    """What the function wrote there is rolled back; what it did elsewhere is in doubt, at once and
    until somebody settles it. The error is raised as it was.
    """
    bank = Bank()
    rules: Any = {"consumer": "billing", "policy": HOLD, "transaction": sql.engine}
    decorate: Any = once(sql.ledger, key=lambda message: message.id, **rules)
    pay = decorate(bank)
    for error in (TimeoutError, InDoubtError):
        with pytest.raises(error):
            pay(Message("3"))
    assert (bank.paid, sql.effects(), in_doubt(sql)) == (["3"], [], ["3"])
    sql.ledger.reset(Key("billing", "3"))
    with pytest.raises(TimeoutError):
        pay(Message("3"))


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("on_in_doubt", ["hold", "dead_letter", "retry", "probe"])
def test_consumer(
    queue: Queue, sql: Sql, joins: bool, on_in_doubt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Only `retry` repeats the effect. What is held is a dead letter, until somebody settles it;
    under a probe the message waits in the ledger, and the probe is asked when it is due.
    """
    bank = Bank()
    is_probed = on_in_doubt == "probe"
    policy = replace(HOLD, on_in_doubt=(lambda _: "happened") if is_probed else on_in_doubt)
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing", policy=policy)
    if joins:
        consumer.transactional(sql.engine)
    queue.put(*NAMES)
    report = consumer.consume(bank, drain=True)
    # In a window that is rolled back for it, it runs once more alone: but only if it may.
    assert bank.paid.count("3") == (3 + joins if on_in_doubt == "retry" else 1)
    assert (in_doubt(sql) == ["3"]) is (on_in_doubt == "hold")
    assert report.in_doubt == (on_in_doubt in ("hold", "probe"))
    assert ("effect_unknown" in events_in(caplog)) is bool(report.in_doubt)
    assert [letter.message.id for letter in sql.ledger.dead("billing")] == ["3"] * (not is_probed)
    assert sql.record("4").state is State.COMPLETED
    if on_in_doubt == "hold":
        sql.ledger.happened(Key("billing", "3"))
    ends_well = is_probed or on_in_doubt == "hold"
    assert sql.record("3").state is (State.COMPLETED if ends_well else State.FAILED)


def test_all_messages_of_a_handler_that_takes_several(queue: Queue, sql: Sql) -> None:
    """It may have had its effect for each: none of them runs again."""
    bank = Bank()
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing", policy=HOLD)
    queue.put(*NAMES)
    consumer.transactional(sql.engine, together=True).consume(bank.all, drain=True)
    assert sorted(bank.paid) == NAMES[:4]
    assert {"3", "4"} <= {*in_doubt(sql)}
