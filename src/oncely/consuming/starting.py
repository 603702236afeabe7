"""Starting: claims deliveries, and runs the handlers of those that are granted."""

from collections.abc import Sequence

from oncely.consuming.executors import Executor
from oncely.consuming.put_off import FirstSeen
from oncely.consuming.retries import Retries
from oncely.consuming.settings import ConsumerSettings
from oncely.consuming.turn import DeliveryTurn
from oncely.consuming.window_claims import Claims
from oncely.core.errors import MessageError
from oncely.core.rules import after_unknown
from oncely.core.verdicts import DeadLetter
from oncely.lifecycle.held_message import Untracked
from oncely.lifecycle.turn import Kept
from oncely.transports.transport import Delivery


class UnhandledError(MessageError):
    """No handler takes a message of that type."""


class Starting:
    """Prepares turns, claims them by `claims`, and has `place` run those that are granted. Without
    claims all run; without `retries` no message waits in the ledger.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        claims: Claims | None,
        retries: Retries | None,
        executor: Executor[DeliveryTurn],
        *,
        drains: bool,
    ) -> None:
        self._settings = settings
        self._parts = settings.parts
        self._claims = claims
        self._retries = retries
        self._executor = executor
        self._drains = drains
        self._unknown = FirstSeen()

    def turn(self, delivery: Delivery) -> DeliveryTurn:
        """The turn of a delivery, prepared."""
        turn = DeliveryTurn(delivery, self._parts.handlers.of(delivery.message.type))
        self.prepare(turn)
        return turn

    def prepare(self, turn: DeliveryTurn) -> None:
        """Find out what is known of a message before it is claimed."""
        if turn.delivery.problem is not None:
            turn.refusal = MessageError(turn.delivery.problem)
            return
        if self._claims is not None:
            self._claims.prepare(turn)
        if not turn.has_handler and turn.refusal is None:
            self._wait_for_a_handler(turn)
        elif self._claims is None:
            turn.begun = Untracked(turn.message)

    def start(self, turns: Sequence[DeliveryTurn]) -> Sequence[DeliveryTurn]:
        """Run the granted turns; return those whose handler does not run."""
        if self._executor.is_stopped:
            return turns
        if self._retries is not None:
            new = [turn for turn in turns if turn.taken is None and turn.ending is None]
            self._retries.keep_order(new)
        asking = [turn for turn in turns if turn.ending is None and turn.refusal is None]
        if self._claims is not None and self._parts.begins is None and asking:
            self._claims.begin(asking)
        running = [turn for turn in asking if self._is_to_run(turn)]
        if running:
            self._executor.start(running)
        if len(running) == len(turns):
            return []
        started = set(running)
        return [turn for turn in turns if turn not in started]

    def _wait_for_a_handler(self, turn: DeliveryTurn) -> None:
        """Let a message wait whose type no handler here takes: another worker may take it."""
        error = UnhandledError(f"nothing here takes messages of the type {turn.message.type!r}")
        waited_s = self._unknown.ago(turn.message.id)
        if turn.taken is not None:
            waited_s = (turn.taken.due or 0.0) - (turn.taken.since or 0.0)
        ending = after_unknown(self._settings.policy, error, waited_s, drains=self._drains)
        if isinstance(ending.verdict, DeadLetter):
            turn.refusal = error
        else:
            turn.ending = ending
            turn.waits = self._retries is not None

    def _is_to_run(self, turn: DeliveryTurn) -> bool:
        if turn.refusal is not None or isinstance(turn.begun, Kept):
            return bool(self._parts.outer)
        return turn.begun is not None or self._parts.begins is not None
