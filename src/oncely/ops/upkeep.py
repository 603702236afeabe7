"""Keeping a ledger small, and free of settings that lose or repeat messages."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from functools import partial

from oncely.core.durations import Duration, lease_seconds, seconds
from oncely.core.errors import ConfigError
from oncely.core.policy import Policy
from oncely.ledger import Ledger
from oncely.ops.known import check_known, consumers

RETENTION = Policy().retention
LEASE = Policy().lease
_SLIP = 0.85
"""From here on two names are so much alike that one may be the other, mistyped."""

# ---- Purging -----------------------------------------------------------------------------------


def purge(
    ledger: Ledger,
    older_than: Duration | None = None,
    *,
    consumer: str | None = None,
    retention: Mapping[str, Duration] | None = None,
    batch: int = 1_000,
    on_batch: Callable[[str, int], None] = lambda _, __: None,
) -> Mapping[str, int]:
    """Remove what was last seen longer ago than its consumer's `retention`, or `older_than`, or
    where neither is said as its consumer's own policy says.

    Returns, and logs, how many of each consumer; of `consumer` alone where that is set.
    `on_batch` is told of every batch: whose records, and how many. Raises ConfigError before
    anything is removed when a name in `retention` looks like a slip.
    """
    kept = retentions(ledger, older_than, consumer=consumer, retention=retention)
    return {
        name: ledger.purge(age, name, batch, on_batch=partial(on_batch, name))
        for name, age in kept.items()
    }


def retentions(
    ledger: Ledger,
    older_than: Duration | None,
    *,
    consumer: str | None,
    retention: Mapping[str, Duration] | None,
) -> Mapping[str, Duration]:
    """How long each consumer's records, or those of `consumer` alone, are kept. Raises ConfigError
    when `consumer` or a name in `retention` looks like a slip.
    """
    own = retention or {}
    for name, kept in own.items():
        seconds(kept, f"retention of {name}")
    names = consumers(ledger) if consumer is None else [consumer]
    _refuse_slips(own, names)
    if consumer is not None and consumer not in own and consumer not in ledger.retentions():
        _refuse_slip(ledger, consumer)
    if older_than is not None:
        return {name: own.get(name, older_than) for name in names}
    kept_by = {**ledger.retentions(), **own}
    return {name: kept_by.get(name, RETENTION) for name in names}


def _refuse_slip(ledger: Ledger, consumer: str) -> None:
    # Who is like nobody may just have no records left, or none yet: that stops no nightly job.
    if get_close_matches(consumer, consumers(ledger), n=1, cutoff=_SLIP):
        check_known(ledger, consumer)


def _refuse_slips(retention: Mapping[str, Duration], names: Sequence[str]) -> None:
    # A consumer without records may just have none left. But if its name is a slip, the one that
    # was meant would lose what it was to keep.
    others = [name for name in names if name not in retention]
    for name in retention.keys() - set(names):
        for near in get_close_matches(name, others, n=1, cutoff=_SLIP):
            raise ConfigError(
                f"retention: no record is of {name!r}; did you mean {near!r}? "
                f"If not, give {near!r} a retention of its own as well"
            )


# ---- Checking ----------------------------------------------------------------------------------


def problems(
    ledger: Ledger,
    *,
    lease: Duration = LEASE,
    broker_timeout: Duration | None = None,
    replay_window: Duration | None = None,
    retention: Duration | None = None,
) -> Sequence[str]:
    """What can lose or repeat messages, a sentence each: the store's own, and the settings'.

    `replay_window` is how long after a message was last seen it may be delivered again;
    `broker_timeout` how long the broker waits for an acknowledgement. Without them nothing is
    said about retention and lease. The retention is each consumer's own, unless one is given.
    """
    found = list(ledger.problems())
    if replay_window is not None:
        of_whom = _own_retentions(ledger) if retention is None else {"": retention}
        for whose, kept in of_whom.items():
            found += _forgotten_early(whose, kept, replay_window)
    if broker_timeout is not None:
        found += _runs_out_early(lease, broker_timeout)
    return found


def _own_retentions(ledger: Ledger) -> Mapping[str, Duration]:
    """Of each consumer, as a sentence names it; where none told one, what is assumed."""
    kept = sorted(ledger.retentions().items())
    return {f" of {name!r}": _as_written(own) for name, own in kept} or {"": RETENTION}


def _as_written(kept: timedelta) -> str:
    return f"{kept / timedelta(days=1):g}d" if kept.days else f"{kept.total_seconds():g}s"


def _forgotten_early(whose: str, retention: Duration, replay_window: Duration) -> Sequence[str]:
    if seconds(retention, "retention") > seconds(replay_window, "replay_window"):
        return []
    sentence = (
        f"The retention{whose} ({retention}) is not longer than the replay window "
        f"({replay_window}): a message that is delivered again after its record was purged is "
        "refused as too old, and without a time it runs again. Keep records for longer than "
        "producers retry, brokers redeliver and a worker holds a delivery that it has not claimed, "
        "all together."
    )
    return [sentence]


def _runs_out_early(lease: Duration, broker_timeout: Duration) -> Sequence[str]:
    lease_s = lease_seconds(lease)
    if lease_s is None or lease_s >= seconds(broker_timeout, "broker_timeout"):
        return []
    sentence = (
        f"The lease ({lease}) is shorter than the broker's acknowledgement timeout "
        f"({broker_timeout}). It is extended while the handler runs; but a worker that stalls for "
        "that long loses its claim while the broker still leaves the delivery to it, and another "
        "delivery of the message can run beside it. Set the lease to the timeout or more, or "
        'on_in_doubt = "hold".'
    )
    return [sentence]
