"""Counts: added up over tasks and batches."""

from collections import Counter

from oncely.spark.sink.counts import MAX_REASONS, OTHER_REASONS, Counts


def test_reasons_are_bounded_for_the_run() -> None:
    """However many tasks and batches there are; none is left uncounted."""
    total = Counts()
    for batch in range(100):
        reasons = Counter({f"no account {batch}-{n}": 2 for n in range(MAX_REASONS)})
        total += Counts(received=100, quarantined=reasons)
    assert total.quarantined.total() == total.received == total.settled == 10_000
    assert len(total.quarantined) == MAX_REASONS + 1
    assert total.quarantined[OTHER_REASONS] == 9_900
    assert total.quarantined["no account 0-7"] == 2


def test_a_long_reason_is_cut() -> None:
    """It is a name to count under; the quarantine has it whole."""
    counts = Counts()
    counts.set_aside("x" * 1_000)
    [reason] = counts.quarantined
    assert (len(reason), reason[-1]) == (200, "…")
