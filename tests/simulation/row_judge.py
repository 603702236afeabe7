"""U1 and U2: how records may change."""

from collections.abc import Iterator, Mapping

from tests.simulation.history import Event, Name, StoredRow
from tests.simulation.judging import NEAR_S, RETRY_S, Judge, is_held, is_operator


class RowJudge(Judge):
    """U1, U2: how each record changed, by whom, and when."""

    def wrongs(self) -> Iterator[str]:
        owners: dict[tuple[Name, int, int], str] = {}
        """Who was granted a claim, by its key, birth and fence."""
        self._left: set[Name] = set()
        """Messages that wait for a retry, and whose records were removed: they stay, and another
        delivery is treated as new. The retry finds out that it is a duplicate.
        """
        for event in self.history.of("row"):
            before, after = event.facts["before"], event.facts["after"]
            if event.facts["due"] is None:
                self._left.discard(event.facts["key"])
            elif after is None:
                self._left.add(event.facts["key"])
            told = self._wrong(event, before, after, owners)
            if told is not None:
                yield f"{told}: {event}"
            if after is not None and (before is None or after.fence != before.fence):
                owners[event.facts["key"], after.birth, after.fence] = event.actor

    def _wrong(
        self,
        event: Event,
        before: StoredRow | None,
        after: StoredRow | None,
        owners: Mapping[tuple[Name, int, int], str],
    ) -> str | None:
        if before is None:
            return None if after is None else self._wrong_birth(event, after)
        owner = owners.get((event.facts["key"], before.birth, before.fence))
        if after is None:
            return self._wrong_removal(event, before, owner)
        if after.fence < before.fence:
            return "U1: a fence has shrunk"
        if after.version == before.version:
            return "U2: a change that its version does not tell"
        if after.fence > before.fence:
            return self._wrong_grant(event, before, after)
        if is_operator(event):
            return self._wrong_decision(event, before, after)
        return self._wrong_write(event, before, after, owner)

    def _wrong_birth(self, event: Event, after: StoredRow) -> str | None:
        if (after.state, after.fence, after.attempts) != ("processing", 1, 1):
            return "a record that does not begin with a claim"
        return self._wrong_lease(event, after)

    def _wrong_lease(self, event: Event, row: StoredRow) -> str | None:
        if row.lease_until is None or abs(row.lease_until - event.at - self.promises.lease_s) > (
            NEAR_S
        ):
            return "a lease that does not count from the store's own clock"
        return None

    def _wrong_removal(self, event: Event, before: StoredRow, owner: str | None) -> str | None:
        if not is_operator(event):
            is_first = (before.state, before.attempts) == ("processing", 1)
            return None if is_first and owner == event.actor else "U2: another one's claim removed"
        if is_held(before, event.at):
            return "a live claim was removed"
        return None

    def _wrong_grant(self, event: Event, before: StoredRow, after: StoredRow) -> str | None:
        if after.fence != before.fence + 1:
            return "U1: a fence does not grow by one"
        if before.state == "handled":
            is_same = (after.state, after.attempts) == ("handled", before.attempts)
            return None if is_same else "a handled message was granted to be handled"
        # A claim that was made in company, and ran out, costs nothing: nobody knows who is guilty.
        is_free = after.is_alone and before.state == "processing" and not before.is_alone
        is_free = is_free and not before.is_unknown
        if after.state != "processing" or after.attempts != before.attempts + (not is_free):
            return "a claim that does not count its attempt"
        is_doubtful = before.state == "processing" and not before.is_unknown
        if event.actor.startswith("consumer") and is_doubtful and not after.is_alone:
            return "what may have killed a worker was granted in company"
        if after.attempts > self.promises.tries:
            return "granted more often than there are tries"
        if after.result != before.result:
            return "a grant changes the result"
        return self._wrong_grantee(event, before) or self._wrong_lease(event, after)

    def _wrong_grantee(self, event: Event, before: StoredRow) -> str | None:
        if before.state == "sent":
            return "a completed message was granted"
        if before.exhausted:
            return "an exhausted message was granted"
        if before.state == "failed":
            is_once = before.attempts and self.promises.on_failed != "retry"
            return "a failed message was granted against the policy" if is_once else None
        if is_held(before, event.at + NEAR_S):
            return "taken over before the lease was over"
        if self.promises.on_in_doubt not in ("retry", "probe"):
            return "a doubtful message was granted against the policy"
        return None

    def _wrong_decision(self, event: Event, before: StoredRow, after: StoredRow) -> str | None:
        """An operator has reset it, or said that it happened."""
        if is_held(before, event.at):
            return "a live claim was decided by an operator"
        if before.state in ("sent", "handled"):
            return "what is handled was decided by an operator"
        if before.birth == after.birth:
            return "decided by an operator, and the old claim may write still"
        if after.state == "sent":
            return self._wrong_happening(event, before)
        if (after.state, after.attempts, after.exhausted) != ("failed", 0, False):
            return "a reset that does not allow to run"
        return None

    def _wrong_happening(self, event: Event, before: StoredRow) -> str | None:
        if before.state != "processing":
            return "said to have happened, and not in doubt"
        is_left = event.facts["due"] is not None
        return "said to have happened, and waiting to be tried again" if is_left else None

    def _wrong_write(
        self, event: Event, before: StoredRow, after: StoredRow, owner: str | None
    ) -> str | None:
        """A change under the same fence, by no operator."""
        if before.state == "sent":
            is_count = after.state == "sent" and after.result == before.result
            return None if is_count else "a completed record has changed"
        if before.state == "handled":
            return self._wrong_finish(event, after)
        if before.exhausted:
            return "an exhausted record has changed"
        if self._is_set_aside(event, before, after):
            return None
        if before.state == "failed":
            # That a message which waits was delivered is noted: its time, and nothing else.
            is_noted = before.lease_until and after == before._replace(version=after.version)
            return None if is_noted else "a failed record has changed without a claim"
        is_found = after.state == "sent" and after.birth != before.birth
        if is_found or owner != event.actor:
            return self._wrong_probe(event, before, after)
        return self._wrong_end(event, before, after)

    def _wrong_finish(self, event: Event, after: StoredRow) -> str | None:
        if after.state != "sent":
            return "what is handled can only be completed"
        return "U4: completed although messages wait" if event.facts["waits"] else None

    def _is_set_aside(self, event: Event, before: StoredRow, after: StoredRow) -> bool:
        """Whether an asker found that no try is left, or that the policy allows none."""
        if (after.state, after.exhausted) != ("failed", True):
            return False
        if is_held(before, event.at + NEAR_S):
            return False
        is_spent = before.attempts >= self.promises.tries
        policy = self.promises
        by_policy = policy.on_failed if before.state == "failed" else policy.on_in_doubt
        return (is_spent and by_policy != "hold") or by_policy == "dead_letter"

    def _wrong_probe(self, event: Event, before: StoredRow, after: StoredRow) -> str | None:
        """Who is at work on it cannot write any more."""
        is_found = after.state == "sent" and after.birth != before.birth
        is_probed = is_found and self.promises.on_in_doubt == "probe"
        if is_probed and not is_held(before, event.at + NEAR_S):
            return None
        return "U2: another one's claim was written"

    def _wrong_end(self, event: Event, before: StoredRow, after: StoredRow) -> str | None:
        """What the holder of a claim did to its record."""
        if after.attempts < before.attempts or after.birth != before.birth:
            is_released = after.state == "failed" or not is_held(after, event.at + NEAR_S)
            is_free = before.is_alone and after.state == "processing"
            is_as_before = before.attempts - after.attempts in ({0, 1} if is_free else {1})
            return None if is_released and is_as_before else "not released to what it was"
        if after.state == "processing" and after.is_unknown:
            return "in doubt, and held" if is_held(after, event.at + NEAR_S) else None
        if after.state == "processing":
            return self._wrong_lease(event, after)
        if after.lease_until is not None and after.state != "failed":
            return "a lease on what nobody works on"
        if after.lease_until is not None:
            return self._wrong_wait(event, after, after.lease_until)
        if after.state == "sent" and event.facts["waits"]:
            return "U4: completed although messages wait"
        # Others know nothing of what waits to be tried again; a consumer finds it there later.
        is_done = after.state in ("sent", "handled") and event.actor.startswith("consumer")
        is_known = event.facts["due"] is not None and event.facts["key"] not in self._left
        if is_done and is_known:
            return "done, and still waiting for a retry"
        return None

    def _wrong_wait(self, event: Event, after: StoredRow, until: float) -> str | None:
        """A message to retry waits with its record, for as long as the policy says."""
        due = event.facts["due"]
        if due is None:
            return "U5: said to wait, and nothing does"
        if abs(due - until) > NEAR_S:
            return f"said to wait until {until}, and what waits is due at {due}"
        delays_s = self.promises.delays_s
        allowed_s = (RETRY_S, delays_s[min(after.attempts, len(delays_s)) - 1])
        is_right = any(abs(due - event.at - delay_s) < NEAR_S for delay_s in allowed_s)
        return None if is_right else "to be tried again at another time than the policy says"
