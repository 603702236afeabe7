"""Resender: what it sends, and what it leaves."""

from contextlib import closing
from dataclasses import replace

from tests.conditions import wait_until
from tests.records import granted

from oncely import Key, Message, open_ledger
from oncely.adapters.resender import Resender
from oncely.core.waiting import WaitingMessage, retries_of, retry_name

KEY, QUEUE = Key("c", "1"), retries_of("c")
LETTER = WaitingMessage(
    *("1", "celery", Message("1"), KEY),
    queue=QUEUE,
    name=retry_name(QUEUE),
    is_set_aside=True,
    reason="no",
)


def test_failed_before_it_is_removed(sqlite_ledger_url: str) -> None:
    """A message that fails again while its Resender is about to remove it is a dead letter, and one
    that the broker did not take waits. What other frameworks have kept is left alone.
    """
    sent: list[str] = []

    def send(message: Message) -> None:
        sent.append(message.id)
        if len(sent) == 1:
            ledger.mailbox.keep((), [replace(LETTER, reason="no again")])
        else:
            raise OSError("no broker")

    with closing(open_ledger(sqlite_ledger_url)) as ledger:
        ledger.fail(granted(ledger.claim(KEY)), "no")
        other = replace(LETTER, destination="dramatiq", parent=Key("c", "2"), is_set_aside=False)
        ledger.mailbox.keep([LETTER, other])
        [letter] = ledger.dead()
        with closing(Resender(ledger, "celery", ["c"], send)):
            ledger.retry_dead(letter.id)
            wait_until(lambda: [each.reason for each in ledger.dead()] == ["no again"])
            ledger.retry_dead(letter.id)
            wait_until(lambda: any(each.error for each in ledger.waiting("c")))
            assert sent == ["1", "1"]
