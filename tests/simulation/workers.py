"""What runs in a simulated process: oncely's own code, and as little around it as can be."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.simulation.judging import RETRY_S
from tests.simulation.primitives import SimulatedEvent
from tests.simulation.scheduler import Scheduler

from oncely.core.control import EffectUnknown, Retry, Unrecoverable
from oncely.core.errors import (
    BusyError,
    FencedError,
    RefusedError,
    StoreError,
    StoreUnavailable,
    TransportError,
)
from oncely.core.ids import fingerprint_of
from oncely.core.message import Message, current
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.core.verdicts import Ack, Acknowledgement, Reject, Requeue
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.work import claimed
from oncely.once import once
from oncely.transports.transport import Delivery, Transport

QUEUE = "work"
CONSUMER = "billing"
MAILS = "mails"
_AGAIN_S = 1.0
_IDLE_S = 0.5

Handler = Callable[[Message], Any]
Answer = Callable[[Message], Any]
"""Handles a message, or not; what it returns, the caller gets."""


class SimulatedFailure(Exception):
    """What a handler raises."""


class SimulatedHandler:
    """The handler of all workers: it notes what it does.

    A message's body says how long it takes, how often it fails, and what it sends. Where there is
    a handler of the user's own, it does the work instead, for as long.
    """

    def __init__(
        self, scheduler: Scheduler, note: Callable[..., None], users: Handler | None
    ) -> None:
        self._scheduler = scheduler
        self._note = note
        self._users = users
        self._raised: list[Exception] = []

    def has_raised(self, error: Exception) -> bool:
        """Whether this is what a run of the handler has raised, as it was."""
        return any(each is error for each in self._raised)

    def __call__(self, message: Message) -> Any:
        """Have the effect, and return a result that no other run has."""
        told = self._told(message)
        self._note("started", **told)
        try:
            result = self._work(message, told)
        except Exception as error:
            self._raised.append(error)
            kinds = {"final": Unrecoverable, "unknown": EffectUnknown}
            self._note("raised", **told, **{n: isinstance(error, k) for n, k in kinds.items()})
            raise
        self._note("done", **told)
        return result

    def _work(self, message: Message, told: dict[str, Any]) -> Any:
        spec = message.json()
        if self._users is not None:
            result = self._users(message)
            self._scheduler.call(spec["runs_s"])
            return result
        fails = told["attempt"] <= spec["fails"]
        self._scheduler.call(spec["runs_s"] / 2)
        for number in range(spec["steps"]):
            self._step(message, f"step{number}", spec["step_s"], told)
        if fails and not spec["effect_first"]:
            raise self._error(spec["error"])
        for number in range(spec["sends"]):
            message.send(MAILS, {"parent": message.id, "number": number})
        self._scheduler.call(spec["runs_s"] / 2)
        self._note("effect", **told)
        if fails:
            raise self._error(spec["error"])
        return f"{message.id}/{told['fence']}/{told['birth']}"

    def _told(self, message: Message) -> dict[str, Any]:
        """What names this run."""
        claim = current().claim
        return {
            "key": (CONSUMER, message.id),
            "fence": claim.fence,
            "attempt": claim.attempts,
            "birth": claim.birth,
            "other": b'"other"' in message.body,
        }

    def _step(self, message: Message, name: str, step_s: float, told: dict[str, Any]) -> None:
        def step() -> str:
            # Noted as it begins: a worker that is frozen here has decided to run it.
            self._note("step", **told, step=name)
            self._scheduler.call(step_s)
            return f"{name}/{told['fence']}"

        message.step(name, step)

    def _error(self, kind: str) -> Exception:
        match kind:
            case "final":
                return Unrecoverable("this can never work")
            case "retry":
                return Retry("again", timedelta(seconds=RETRY_S))
            case "plain":
                return SimulatedFailure("it failed")
            case _:
                return EffectUnknown("it may have happened")


# ---- Workers -----------------------------------------------------------------------------------


def answered_by_once(ledger: Ledger, handler: Handler, policy: Policy) -> Answer:
    """A function under `once`."""

    def key(message: Message) -> str | None:
        return message.id

    def fingerprint(message: Message) -> Any:
        return message.body

    decorate = once(ledger, consumer=CONSUMER, key=key, fingerprint=fingerprint, policy=policy)

    def charge(message: Message) -> Any:
        return handler(message)

    return decorate(charge)


def answered_by_claimed(ledger: Ledger, handler: Handler, policy: Policy) -> Answer:
    """A block under `claimed`."""

    def charge(message: Message) -> Any:
        key = Key(CONSUMER, message.id)
        seen = fingerprint_of(message.body)
        with claimed(ledger, key, fingerprint=seen, message=message, policy=policy) as work:
            if work.is_new:
                work.result = handler(message)
        if not work.is_settled:
            raise StoreUnavailable("nobody knows whether the end of the block is stored")
        return work.result

    return charge


class CallerLoop:
    """Calls a function for each delivery, one after another, as a worker without a Consumer."""

    def __init__(
        self,
        transport: Transport,
        answer: Answer,
        stop: SimulatedEvent,
        handler: SimulatedHandler,
        note: Callable[..., None],
    ) -> None:
        self._transport = transport
        self._answer = answer
        self._stop = stop
        self._handler = handler
        self._note = note

    def run(self) -> None:
        """Until it is to stop."""
        while not self._stop.is_set():
            try:
                self._work()
            except KeyboardInterrupt:
                self._note("was_interrupted")

    def _work(self) -> None:
        try:
            for delivery in self._transport.receive(QUEUE, 1, _IDLE_S):
                self._transport.acknowledge([(delivery, self._verdict(delivery))])
        except TransportError:
            self._stop.wait(_AGAIN_S)

    def _verdict(self, delivery: Delivery) -> Acknowledgement:
        try:
            result = self._answer(delivery.message)
        except KeyboardInterrupt:
            self._note("was_interrupted")
            return Requeue()
        except Exception as error:  # noqa: BLE001 - what may be raised is judged below.
            return self._after(error, delivery.message)
        self._note("returned", key=(CONSUMER, delivery.message.id), result=result)
        return Ack()

    def _after(self, error: Exception, message: Message) -> Acknowledgement:
        if isinstance(error, RefusedError):
            return Reject(f"{type(error).__name__}: {error}")
        if isinstance(error, BusyError | FencedError | StoreError):
            self._note("put_off", id=message.id, error=type(error).__name__)
        elif not self._handler.has_raised(error):
            raise error
        # The caller is who tries again, until the ledger says that no try is left.
        self._stop.wait(_AGAIN_S)
        return Requeue()
