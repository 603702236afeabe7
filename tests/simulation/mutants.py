"""Bugs, planted one at a time: the simulation has to find each."""

from pathlib import Path
from typing import NamedTuple

import oncely

SOURCES = Path(oncely.__file__).parent


class Mutant(NamedTuple):
    """A change of one place in one file that breaks a rule."""

    name: str
    file: str
    old: str
    new: str
    seed: int = 0
    """One that finds it: the search begins there, unless ONCELY_TEST_ALL is set."""

    def text(self) -> str:
        """The file with the bug in it. Raises AssertionError where the place is not there once."""
        source = (SOURCES / self.file).read_text()
        found = source.count(self.old)
        assert found == 1, f"{self.name}: {self.old!r} stands {found} times in {self.file}"
        return source.replace(self.old, self.new)


RULES = "core/rules.py"
TURN = "core/turn.py"
SETTLE = "ledger/settle.py"
CALLS = "ledger/ledger_calls.py"
LIFECYCLE = "lifecycle/lifecycle.py"
RETRY_QUEUE = "lifecycle/retry_queue.py"
SOURCE = "consumer/source.py"
TABLES = "stores/memory_tables.py"

MUTANTS = [
    # ---- The rules -----------------------------------------------------------------------------
    Mutant(
        "a claim is taken over before its lease is over",
        RULES,
        "record.lease_until is None or now < record.lease_until",
        "record.lease_until is None or now + 1.0 < record.lease_until",
        seed=13,
    ),
    Mutant(
        "what happened leaves the old claim",
        RULES,
        "version=version_of(record.birth + _AFTER_DECISION, change.version)",
        "version=change.version",
        seed=2,
    ),
    Mutant(
        "what a probe has found leaves the old claim",
        RULES,
        "change = change.but(version_of(record.birth + _AFTER_DECISION, change.version))",
        "",
    ),
    Mutant(
        "an old fence may write",
        RULES,
        "record.fence == claim.fence and record.birth == claim.birth",
        "record.state is State.PROCESSING",
        seed=163,
    ),
    Mutant(
        "a claim from before a release or a forget may write",
        RULES,
        "record.fence == claim.fence and record.birth == claim.birth",
        "record.fence == claim.fence",
        seed=163,
    ),
    Mutant(
        "attempts are not counted when a claim is granted again",
        RULES,
        "return _grant(record, ask, record.attempts + 1, now)",
        "return _grant(record, ask, record.attempts, now)",
    ),
    Mutant(
        "a death in company costs an attempt",
        RULES,
        "spent = record.attempts if costs else record.attempts - 1",
        "spent = record.attempts",
        seed=12,
    ),
    Mutant(
        "the death of what was claimed alone costs no attempt",
        RULES,
        "ask.company is not Company.ALONE or _is_marked(record, _ALONE, _UNKNOWN)",
        "ask.company is not Company.ALONE",
        seed=882,
    ),
    Mutant(
        "what may have killed a worker is granted in company",
        RULES,
        "case _ if ask.company in (Company.WINDOW, Company.AGAIN) and not is_told:",
        "case _ if ask.company is Company.AGAIN:",
        seed=12,
    ),
    Mutant(
        "tries are not limited when a claim is granted after a death",
        RULES,
        "    if not ask.policy.is_spent(spent):\n        return _grant",
        "    if True:\n        return _grant",
        seed=316,
    ),
    Mutant(
        "a release takes the fence back",
        RULES,
        '            "lease_s": None if former',
        '            "fence": former.fence,\n            "lease_s": None if former',
        seed=130,
    ),
    Mutant(
        "another body under a known id is handled",
        RULES,
        "and ask.fingerprint != record.fingerprint",
        "and ask.fingerprint == record.key.message_id",
    ),
    Mutant(
        "what failed at most once runs again",
        RULES,
        'case "skip":\n            return Decision(Duplicate(record))',
        'case "skip":\n            return _grant_again(record, ask, now)',
        seed=23,
    ),
    Mutant(
        "a doubt that is to be held runs again",
        RULES,
        'case "hold":\n            return Decision(InDoubt(record))',
        'case "hold":\n            return _grant_again(record, ask, now)',
        seed=1,
    ),
    Mutant(
        "a final failure is tried again",
        RULES,
        "fail.error, exhausted=fail.final)",
        "fail.error, exhausted=False)",
    ),
    Mutant(
        "what is handled is handled again",
        RULES,
        "_after_doubt,  _grant_sending, _ask",
        "_after_doubt,  _grant_again, _ask",
        seed=45,
    ),
    # ---- The settler, and the calls ------------------------------------------------------------
    Mutant(
        "who loses a race is told that it won",
        SETTLE,
        "if key in written or decision.optional:",
        "if key in writes or decision.optional:",
        seed=104,
    ),
    Mutant(
        "a write whose reply is lost is taken for stored",
        SETTLE,
        "written |= self._store.delete(removed)\n        except KeysLocked",
        "written |= self._store.delete(removed)\n        except ReplyLost:\n"
        "            written |= set(writes)\n            raise\n        except KeysLocked",
        seed=192,
    ),
    Mutant(
        "leases count from 1970",
        "core/change.py",
        "None if lease_s is None else now + lease_s",
        "None if lease_s is None else lease_s",
    ),
    Mutant(
        "messages of a fenced handler are deferred",
        CALLS,
        "if isinstance(o, Written) and not o.is_repeated",
        "if o is not None",
        seed=106,
    ),
    Mutant(
        "a message is completed while others wait",
        "ledger/mailbox.py",
        "for key in keys if key not in unsent]",
        "for key in keys]",
        seed=113,
    ),
    Mutant(
        "a step is kept under an old fence",
        CALLS,
        "            raise_if_fenced(cast(WriteOutcome, outcome))\n"
        "            transaction.keep_step",
        "            transaction.keep_step",
        seed=263,
    ),
    # ---- The relay -----------------------------------------------------------------------------
    Mutant(
        "what a relay has taken is marked as sent before it is published",
        "outbox.py",
        "        self._batch = _Batch(taken, good_until)\n",
        "        self._batch = _Batch(taken, good_until)\n"
        "        means.ledger.mailbox.sent(taken)\n",
    ),
    Mutant(
        "what stands behind a refused message of its lane is sent before it",
        "outbox.py",
        "            self._lanes[lane].clear()",
        "            self._lanes[lane].popleft()",
        seed=314,
    ),
    # ---- What waits ----------------------------------------------------------------------------
    Mutant(
        "a redelivery of what waits is granted",
        RULES,
        "    if due is not None and not (ask.is_taken and due <= now):",
        "    if False:",
        seed=116,
    ),
    Mutant(
        "what was taken before it failed runs again before it is due",
        RULES,
        "not (ask.is_taken and due <= now):",
        "not ask.is_taken:",
        seed=116,
    ),
    Mutant(
        "what is to be tried again is not kept with its record",
        LIFECYCLE,
        "Write(command, () if queue is None else queue.rows_of(turn), removed=removed)",
        "Write(command, (), removed=removed)",
    ),
    Mutant(
        "what is to be tried again is due at once",
        RETRY_QUEUE,
        "            case Delay(delay_s):\n"
        "                row = replace(self._row(turn), delay_s=delay_s)",
        "            case Delay():\n                row = self._row(turn)",
    ),
    Mutant(
        "what failed again keeps its former place and time",
        CALLS,
        "            transaction.keep(those, renews=renews)",
        "            transaction.keep(those)",
    ),
    Mutant(
        "what another worker has is gone from where it waits",
        RETRY_QUEUE,
        "                left.append(PutBack(taken, None, delay_s, is_try=False))",
        "                done.append(taken)",
        seed=173,
    ),
    Mutant(
        "what is done goes on waiting",
        LIFECYCLE,
        "Write(command, sent, is_over, removed)",
        "Write(command, sent, False, removed)",
        seed=3,
    ),
    Mutant(
        "what has failed is gone from where it waits",
        CALLS,
        "for write in done if write.is_over]:",
        "for write in done]:",
    ),
    Mutant(
        "what waits is taken before what stands in front of it",
        TABLES,
        "if message.is_set_aside or message.lane in closed",
        "if message.is_set_aside",
        seed=33,
    ),
    Mutant(
        "what waits is taken before it is due",
        TABLES,
        "        return max(self.message.due or 0.0, self.held_until)",
        "        return self.held_until",
    ),
    Mutant(
        "what one has taken is given to others",
        TABLES,
        "        return max(self.message.due or 0.0, self.held_until)",
        "        return self.message.due or 0.0",
    ),
    Mutant(
        "a dead letter is tried again by itself",
        TABLES,
        "if message.is_set_aside or message.lane in closed",
        "if message.lane in closed",
    ),
    Mutant(
        "what comes later runs before one of its order that waits",
        SOURCE,
        "found.append(self._mailbox.lanes(self._queue.name, {*lanes.values()}))",
        "found.append(set())",
        seed=33,
    ),
    Mutant(
        "other content is dropped under an id that waits",
        LIFECYCLE,
        "            await self._refuse_others(driver, turns)\n",
        "",
        seed=33,
    ),
    Mutant(
        "a dead letter is not kept with its record",
        RETRY_QUEUE,
        "            case DeadLetter(reason):\n"
        "                return self.dead_letters(turn, reason)\n",
        "            case DeadLetter(reason):\n"
        "                return () if turn.error else self.dead_letters(turn, reason)\n",
        seed=6,
    ),
    Mutant(
        "a dead letter that was refused is not kept",
        LIFECYCLE,
        "keep, waiting, dead, taken)",
        "keep, waiting, [], taken)",
    ),
    Mutant(
        "what could not be kept is acknowledged",
        LIFECYCLE,
        "            for turn in turns:\n                turn.left_in_doubt()\n"
        "            return turns\n",
        "            return []\n",
        seed=820,
    ),
    # ---- The lifecycle -------------------------------------------------------------------------
    Mutant(
        "a message that another worker has is set aside",
        TURN,
        "isinstance(error, RefusedError | MessageError | UnreadableRow | UnstorableMessage):",
        'type(error).__name__ == "BusyError" or '
        "isinstance(error, RefusedError | MessageError | UnreadableRow | UnstorableMessage):",
        seed=5,
    ),
    Mutant(
        "what has begun is released by a stop, though it must not repeat",
        TURN,
        'may_run_again = progress < Progress.CALLED or policy.on_in_doubt == "retry"',
        "may_run_again = progress <= Progress.CALLED",
        seed=13,
    ),
    Mutant(
        "an error that leaves a doubt is taken for a failure",
        TURN,
        "        if leaves_doubt(policy, error, progress):",
        "        if False:",
        seed=1,
    ),
    Mutant(
        "what a handler has sent is dropped",
        LIFECYCLE,
        "        sent = turn.sent()\n",
        "        sent = turn.sent()[:0]\n",
    ),
    Mutant(
        "what could not be stored is acknowledged",
        LIFECYCLE,
        "logged_of(turns)},\n        )\n        for turn in turns:\n            turn.left",
        "logged_of(turns)},\n        )\n        for turn in ():\n            turn.left",
        seed=115,
    ),
    Mutant(
        "a caller gets a result whose end nobody has tried to store",
        "lifecycle/work.py",
        "        await self._lifecycle.store(driver, [turn])\n",
        "        self._lifecycle.let_go([turn])\n",
        seed=2,
    ),
    Mutant(
        "what another has taken over is acknowledged",
        LIFECYCLE,
        "elif isinstance(outcome, Fenced):",
        "elif outcome is None:",
        seed=73,
    ),
    Mutant(
        "a claim is extended for ever when a signal interrupts its end",
        LIFECYCLE,
        "            # ever.\n            self.let_go(turns)\n",
        "            # ever.\n"
        "            self.let_go([t for t in turns if t.state is TurnState.STORED])\n",
        seed=52,
    ),
    Mutant(
        "claims are extended too late",
        "lifecycle/heartbeat.py",
        "_BEATS_PER_LEASE = 3",
        "_BEATS_PER_LEASE = 0.8",
        seed=111,
    ),
    Mutant(
        "a finished step runs again",
        "lifecycle/handler_context.py",
        "            if name not in run_inline(self._kept(blocking)):",
        "            run_inline(self._kept(blocking))\n            if name:",
    ),
]
