"""The broker of a simulation: it delivers again, loses replies, refuses, and is away."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.faults import Weather, Wire
from tests.simulation.history import History
from tests.simulation.scheduler import Scheduler

from oncely.core.errors import PublishRefused, TransportError
from oncely.core.ids import fingerprint_of
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Acknowledgement, Reject, Requeue
from oncely.transports.transport import Delivery, Features

VISIBILITY_S = 20.0
"""What is not acknowledged for so long is delivered again."""


@dataclass(slots=True, eq=False)
class _Letter:
    """A message in a queue."""

    message: Message
    number: int
    count: int = 0
    holder: object | None = None
    visible_at: float = 0.0


class Broker:
    """Queues that are consumed, and what arrives at all other destinations."""

    def __init__(self, scheduler: Scheduler, history: History, consumed: str) -> None:
        self._scheduler = scheduler
        self._history = history
        self._consumed = consumed
        self._letters: list[_Letter] = []
        self._numbers = 0

    @property
    def is_empty(self) -> bool:
        """Whether all that was to be consumed is acknowledged."""
        return not self._letters

    def put(self, actor: str, queue: str, message: Message) -> None:
        """A message arrives."""
        if queue != self._consumed:
            told = {"message": (queue, message.id), "body": message.body.decode()}
            self._note(actor, "arrived", **told)
            return
        self._numbers += 1
        self._note(actor, "published", id=message.id, number=self._numbers)
        self._letters.append(_Letter(message, self._numbers))

    def has_ready(self) -> bool:
        """Whether a receiver would be given something."""
        return any(letter.visible_at <= self._scheduler.now for letter in self._letters)

    def take(self, actor: str, limit: int, holder: object) -> list[Delivery]:
        """Deliver what waits."""
        now = self._scheduler.now
        taken = []
        for letter in [each for each in self._letters if each.visible_at <= now][:limit]:
            letter.count += 1
            letter.holder = holder
            letter.visible_at = now + VISIBILITY_S
            tag = (letter.number, letter.count)
            taken.append(Delivery(letter.message, self._consumed, letter.count, tag))
            self._note(actor, "delivered", id=letter.message.id, tag=tag)
        return taken

    def acknowledge(
        self, actor: str, delivery: Delivery, holder: object, verdict: Acknowledgement
    ) -> None:
        """Do as the verdict says, unless it comes too late."""
        number, count = delivery.tag
        letter = next((each for each in self._letters if each.number == number), None)
        if letter is None or letter.count != count or letter.holder is not holder:
            return
        told: dict[str, Any] = {"id": letter.message.id, "tag": delivery.tag}
        told["fingerprint"] = fingerprint_of(letter.message.body)
        match verdict:
            case Ack():
                self._letters.remove(letter)
                self._note(actor, "acknowledged", **told)
            case Reject(reason):
                self._letters.remove(letter)
                self._note(actor, "dead_letter", reason=reason, **told)
            case Requeue():
                letter.holder, letter.visible_at = None, self._scheduler.now
                self._note(actor, "requeued", **told)

    def give_back(self, holder: object) -> None:
        """Its connection is gone: what it holds is delivered again."""
        for letter in self._letters:
            if letter.holder is holder:
                letter.holder, letter.visible_at = None, self._scheduler.now

    def redeliver_some(self, draw: Callable[[list[Any]], Any]) -> None:
        """Deliver one more time what somebody is at work on."""
        held = [letter for letter in self._letters if letter.holder is not None]
        if held:
            letter = draw(held)
            letter.holder, letter.visible_at = None, self._scheduler.now

    def _note(self, actor: str, what: str, **facts: Any) -> None:
        self._history.add(self._scheduler.now, actor, what, **facts)


class FaultyTransport:
    """The line of one process to the broker."""

    def __init__(
        self, broker: Broker, scheduler: Scheduler, weather: Weather, refusing: float, actor: str
    ) -> None:
        self.features = Features(
            ordered=False,
            counts_deliveries=True,
            max_bytes=None,
            visibility_s=VISIBILITY_S,
        )
        self._broker = broker
        self._scheduler = scheduler
        self._weather = weather
        self._refusing = refusing
        self._actor = actor
        self.holder = object()

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        holder = self.holder
        if not self._broker.has_ready():
            self._scheduler.wait(self._broker.has_ready, wait_s)
            if not self._broker.has_ready():
                return []
        lost = self._begin()
        taken = self._broker.take(self._actor, max_messages, holder)
        self._end(lost)
        return taken

    def acknowledge(self, verdicts: Sequence[tuple[Delivery, Acknowledgement]]) -> None:
        for delivery, verdict in verdicts:
            lost = self._begin()
            self._broker.acknowledge(self._actor, delivery, self.holder, verdict)
            self._end(lost)

    def publish(
        self,
        destination: str,
        messages: Sequence[Message],
        *,
        create: bool = True,
    ) -> None:
        refused: dict[int, str] = {}
        for place, message in enumerate(messages):
            lost = self._begin()
            is_refused = self._weather.draws.random() < self._refusing
            if is_refused and not self._weather.is_over:
                refused[place] = "the broker does not take it"
            else:
                self._broker.put(self._actor, destination, message)
            self._end(lost)
        if refused:
            raise PublishRefused(refused, set(refused))

    def subscribe(self, queue: str, types: Sequence[str], *, alone: bool = False) -> None:
        pass

    def is_drained(self, queue: str) -> bool:
        return self._broker.is_empty

    def close(self) -> None:
        self._scheduler.check()
        self._drop_line()

    def _begin(self) -> bool:
        """Reach the broker; whether the reply is going to be lost."""
        weather = self._weather
        self._scheduler.call(weather.took_s())
        wire = weather.wire(self._scheduler.now)
        if wire in (Wire.REFUSED, Wire.CUT, Wire.LATE):
            self._fail("the broker cannot be reached")
        return wire is Wire.LOST

    def _end(self, lost: bool) -> None:
        self._scheduler.call(self._weather.took_s())
        if lost:
            self._fail("the connection broke")

    def _fail(self, why: str) -> None:
        self._drop_line()
        raise TransportError(why)

    def _drop_line(self) -> None:
        # The broker may take a moment to notice.
        holder, self.holder = self.holder, object()
        self._scheduler.later(
            self._weather.draws.uniform(0.0, 2.0), lambda: self._broker.give_back(holder)
        )
