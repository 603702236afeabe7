"""A handler that has its effect, and then raises an error after which nobody knows that."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection
from tests.logs import events_in
from tests.unit.conftest import Queue, Sql
from tests.unit.test_consumer_transactional import INSERT
from werkzeug.test import Client

from oncely.consumer import Consumer
from oncely.core.control import EffectUnknown
from oncely.core.errors import InDoubtError
from oncely.core.message import Message
from oncely.core.policy import effectively_once
from oncely.core.record import Key, State
from oncely.http import WsgiIdempotencyKey
from oncely.ledger.ledger import Ledger
from oncely.once import once


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


@pytest.mark.parametrize("joins", [None, {}, {"together": True}])
@pytest.mark.parametrize("on_in_doubt", ["hold", "dead_letter", "retry", "probe"])
def test_consumer(
    queue: Queue, sql: Sql, joins: Any, on_in_doubt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Only `retry` repeats the effect, also where a window is rolled back for it. What is held is a
    dead letter, until somebody settles it; under a probe the message waits in the ledger, and the
    probe is asked when it is due.
    """
    bank, key = Bank(), Key("billing", "3")
    is_held, is_probed = on_in_doubt == "hold", on_in_doubt == "probe"
    probe = (lambda _: "happened") if is_probed else on_in_doubt
    policy = effectively_once(backoff="10ms", tries=3, on_in_doubt=probe)
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing", policy=policy)
    if joins is not None:
        consumer.transactional(sql.engine, **joins)
    queue.put(*(str(number) for number in range(5)))
    report = consumer.consume(bank.all if joins else bank, drain=True)
    assert (bank.paid.count("3") == 1) is (on_in_doubt != "retry")
    left = sql.ledger.scan("billing", State.PROCESSING, lease_over=True)
    assert (key in [record.key for record in left]) is is_held
    assert bool(report.in_doubt) is (is_held or is_probed)
    assert ("effect_unknown" in events_in(caplog)) is bool(report.in_doubt)
    assert ("3" in [letter.message.id for letter in sql.ledger.dead("billing")]) is not is_probed
    if is_held:
        sql.ledger.happened(key)
    assert (sql.record("3").state is State.COMPLETED) is (is_probed or is_held)


def test_callers(ledger: Ledger) -> None:
    """The caller of a function gets the error, and so does the server of a request; who asks again
    is told that nobody knows, and nothing is repeated.
    """
    paid: list[str] = []

    @once(ledger, consumer="billing", key=lambda id_: id_, policy=effectively_once())
    def pay(id_: str) -> None:
        paid.append(id_)
        raise ConnectionResetError("no answer")

    def shop(_: Any, __: Any) -> Iterable[bytes]:
        paid.append("request")
        raise EffectUnknown("no answer")

    keyed = WsgiIdempotencyKey(shop, ledger, consumer="api", policy=effectively_once())
    client = Client(keyed)
    with pytest.raises(ConnectionResetError):
        pay("1")
    with pytest.raises(InDoubtError):
        pay("1")
    with pytest.raises(EffectUnknown):
        client.post("/", headers={"Idempotency-Key": "k"})
    again = client.post("/", headers={"Idempotency-Key": "k"})
    assert (again.status_code, paid) == (409, ["1", "request"])
    assert again.json is not None
    assert again.json["code"] == "idempotency_in_doubt"
