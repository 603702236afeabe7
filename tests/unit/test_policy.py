"""Policies and durations: what may be written, and what is said about what may not."""

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from oncely.core.control import Retry
from oncely.core.durations import seconds
from oncely.core.errors import ConfigError
from oncely.core.policy import POLICY_FIELDS, Policy, at_least_once, at_most_once, effectively_once
from oncely.core.unanswered import Unanswered


@pytest.mark.parametrize(
    ("written", "length_s"),
    [
        ("250ms", 0.25),
        ("30s", 30),
        ("5m", 300),
        ("2h", 7_200),
        ("30d", 2_592_000),
        ("1.5h", 5_400),
        ("1h30m", 5_400),
        ("1m500ms", 60.5),
        ("0s", 0),
        (timedelta(minutes=5), 300),
        (timedelta(0), 0),
        (30, 30),
        (0.25, 0.25),
        (0, 0),
    ],
)
def test_durations(written: str | float | timedelta, length_s: float) -> None:
    """A timedelta, a number, or numbers with units, is so many seconds."""
    assert seconds(written) == pytest.approx(length_s)


@pytest.mark.parametrize(
    "written",
    [
        *("", "5", "m", "5 m", " 5m", "5m ", "-5m", "5M", "5w", "5m,", "fünf", "1e3s", "none"),
        *(None, True, [5], float("nan"), float("inf"), 10**400),
    ],
)
def test_no_durations(written: Any) -> None:
    """Anything else is a ConfigError that names the setting and shows what to type."""
    with pytest.raises(ConfigError, match=r"pause: .* is not a duration: write \"30s\""):
        seconds(written, "pause")


@pytest.mark.parametrize("written", ["366001d", "9" * 400 + "d", timedelta.max, 5e11])
@pytest.mark.parametrize(
    "write",
    [
        lambda written: Retry(delay=written),
        lambda written: Policy(backoff=["30s", written]),
        lambda written: Policy(retention=written),
        lambda written: Policy(lease=written),
    ],
    ids=["retry", "backoff", "retention", "lease"],
)
def test_too_long_durations(write: Callable[[Any], object], written: Any) -> None:
    """No database has the time at which it would end."""
    with pytest.raises(ConfigError, match=r': .* is over a thousand years; write "3650d", or less'):
        write(written)


@pytest.mark.parametrize("retention", [timedelta(seconds=-1), -1, -0.5])
def test_negative_durations(retention: timedelta | float) -> None:
    """A span of time is never negative."""
    with pytest.raises(ConfigError, match=r"retention: .* negative"):
        Policy(retention=retention)


def test_defaults() -> None:
    """The defaults are those that the documentation promises. A policy is made once: it can be
    shared, also as a default argument.
    """
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().tries = 7  # type: ignore[misc]
    assert dataclasses.asdict(Policy()) == {
        "on_failed": "retry",
        "tries": 5,
        "backoff": ("30s", "2m", "5m"),
        "on_busy": "requeue",
        "lease": "5m",
        "on_in_doubt": "retry",
        "in_doubt_on": (),
        "on_outage": "pause",
        "on_mismatch": "dead_letter",
        "on_missing_id": "dead_letter",
        "on_too_old": "dead_letter",
        "on_unknown_type": "wait",
        "wait_unknown": "15m",
        "retention": "30d",
        "results": "off",
        "count_duplicates": "each",
    }
    assert tuple(dataclasses.asdict(Policy())) == POLICY_FIELDS


def test_delays() -> None:
    """After each attempt comes the next delay; the last one repeats, as one that stands alone."""
    assert [Policy().delay_s(attempts) for attempts in (1, 2, 3, 4, 99)] == [30, 120, 300, 300, 300]
    assert Policy(backoff="10s").delay_s(3) == 10
    assert Policy(backoff=timedelta(seconds=7)).delay_s(1) == 7
    assert Policy(backoff=2.5).delay_s(3) == 2.5
    assert [Policy(backoff=[5, "10s"]).delay_s(attempts) for attempts in (1, 2)] == [5, 10]


@pytest.mark.parametrize("name", [name for name in POLICY_FIELDS if name.startswith("on_")])
def test_unknown_choices(name: str) -> None:
    """A value that is no choice is refused; the text names the field and the choices."""
    with pytest.raises(ConfigError, match=rf"{name}: 'sometimes' is none of \w+, \w+"):
        Policy(**{name: "sometimes"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_failed", None),
        ("on_failed", []),
        ("on_failed", lambda message: "retry"),
        ("results", True),
        ("tries", 0),
        ("tries", -1),
        ("tries", 2.0),
        ("tries", True),
        ("tries", "5"),
        *(
            ("in_doubt_on", kinds)
            for kinds in (TimeoutError, ["TimeoutError"], ("TimeoutError",), None)
        ),
        ("backoff", ()),
        ("backoff", None),
        ("backoff", -30),
        ("backoff", [True]),
        ("backoff", ["30s", "later"]),
        ("retention", "for ever"),
        *(("lease", lease) for lease in ("0s", "0ms", 0, timedelta(0), timedelta(seconds=-5), "")),
        ("lease", "never"),
    ],
)
def test_bad_fields(name: str, value: Any) -> None:
    """A wrong value is refused when the policy is made, by the name of its field."""
    with pytest.raises(ConfigError, match=f"^{name}: "):
        Policy(**{name: value})


def test_presets() -> None:
    """Each preset says what repeats: at most once nothing, at least once all, else failures."""
    chosen = [
        (preset.on_failed, preset.on_in_doubt, preset.in_doubt_on)
        for preset in (at_most_once(), at_least_once(), effectively_once())
    ]
    held = ("retry", "hold", (Unanswered,))
    assert chosen == [("skip", "hold", ()), ("retry", "retry", ()), held]


@pytest.mark.parametrize("preset", [at_most_once, at_least_once, effectively_once])
def test_presets_take_changes(preset: Any) -> None:
    """A preset takes changes, checks them, and leaves the rest as it is."""
    assert preset(lease="2m", tries=3) == dataclasses.replace(preset(), lease="2m", tries=3)
    with pytest.raises(ConfigError, match="tries"):
        preset(tries=0)
