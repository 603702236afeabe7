"""Transactions: a window of turns in one, with their claims, where all of them succeed."""

import logging
from collections.abc import Callable, Sequence

from oncely.claiming.inbox import Inbox
from oncely.claiming.inline import InlineCalls
from oncely.core.commands import Granted, InDoubt
from oncely.crashpoints import reached
from oncely.handling.around import Handling
from oncely.handling.held_message import HeldMessage
from oncely.handling.transacting import Begins, complete_many
from oncely.runtime.claims import answer, ask
from oncely.runtime.turn import Turn

_log = logging.getLogger(__name__)


class Transactions:
    """Runs turns together in a transaction that `begins` begins, by `run_all`, which tells whether
    all have succeeded.
    """

    def __init__(
        self, handling: Handling, begins: Begins, run_all: Callable[[Sequence[Turn]], bool]
    ) -> None:
        self._handling = handling
        self._begins = begins
        self._run_all = run_all

    def run_many(self, turns: Sequence[Turn]) -> None:
        """Together where all succeed, which is stored then; else they are as they were."""
        together = [turn for turn in turns if turn.key is not None and not turn.is_alone]
        if len(together) < 2:
            return
        is_stored = self._are_stored(together)
        for turn in together:
            turn.is_stored = is_stored
            if not is_stored:
                turn.start_over()

    def _are_stored(self, turns: Sequence[Turn]) -> bool:
        """Whether all of them ran, and what they did is committed."""
        try:
            with (
                self._begins.begin() as link,
                self._handling.ledger.transaction(link) as inbox,
            ):
                self._claim(turns, inbox)
                for turn in turns:
                    turn.link = link
                if not self._run_all(turns):
                    raise _FailedError
                self._complete(turns, inbox)
                reached("before_commit")
        except _FailedError:
            return False
        except Exception:  # noqa: BLE001 - each alone tells what is wrong, and with which.
            _log.info("window_undone", exc_info=True)
            return False
        reached("after_commit")
        return True

    def _claim(self, turns: Sequence[Turn], inbox: Inbox) -> None:
        calls = InlineCalls(inbox)
        outcomes = ask(turns, self._handling, inbox)
        for turn, outcome in zip(turns, outcomes, strict=True):
            match outcome:
                case Granted(claim):
                    turn.begun = HeldMessage(claim, calls, turn.message)
                case InDoubt():
                    raise _FailedError
                case _:
                    answer(turn, outcome, self._handling.policy)
        handled = [turn.key for turn in turns if turn.may_send and turn.key is not None]
        if handled:
            inbox.finish(handled)

    def _complete(self, turns: Sequence[Turn], inbox: Inbox) -> None:
        done = [turn for turn in turns if isinstance(turn.begun, HeldMessage) and turn.has_run]
        held = [turn.begun for turn in done if isinstance(turn.begun, HeldMessage)]
        results = [turn.result for turn in done] if self._handling.keeps_result else None
        complete_many(inbox, held, results)
        inbox.release_many(
            [t.begun.claim for t in turns if isinstance(t.begun, HeldMessage) and not t.has_run]
        )


class _FailedError(Exception):
    """A handler has failed: nothing of the window is to be stored."""
