"""What a seed draws: the policy, the messages, and what befalls the workers."""

import json
import random
from dataclasses import dataclass
from typing import Any

from oncely.core.message import Message
from oncely.core.policy import Policy

FAULTS_S = 20.0
"""After so many seconds nothing goes wrong any more."""

_POLICIES: dict[str, dict[str, Any]] = {
    "at_least_once": {},
    "at_most_once": {"on_failed": "skip", "on_in_doubt": "hold"},
    "effectively_once": {"on_in_doubt": "hold"},
    "doubts_set_aside": {"on_in_doubt": "dead_letter"},
    "failures_set_aside": {"on_failed": "dead_letter"},
    "busy_discarded": {"on_busy": "discard"},
    "probed": {"on_in_doubt": "probe"},
}
_OFTEN = ("at_least_once", "at_most_once", "effectively_once")
STRIKES = ("kill", "kill", "freeze", "freeze", "stop", "interrupt", "interrupt")
BLOWS = ("store_away", "broker_away", "redeliver", "copy", "reset", "settle", "forget", "purge")


@dataclass(frozen=True)
class Scenario:
    """One simulation, drawn from its seed."""

    policy_name: str
    settings: dict[str, Any]
    """Of the policy; "probe" stands for one."""
    messages: list[Message]
    others: list[Message]
    """With an id of one of those, and another body."""
    workers: list[str]
    """What kind each of them is."""
    is_ordered: bool
    """Whether there is one consumer, which keeps messages of one ordering key in their order."""
    blows: list[tuple[float, str]]
    """When something happens to a worker or a server."""
    store_faults: float
    """How likely an exchange with the store goes wrong."""
    broker_faults: float
    slow: float
    refusing: float
    """How likely the broker does not take a message."""
    concurrency: int
    window: int
    clocks_apart_s: float
    limit_s: float
    """Within this time after the last fault everything has to be settled."""

    def policy(self, probe: Any) -> Policy:
        """As workers use it."""
        settings = dict(self.settings)
        if settings.get("on_in_doubt") == "probe":
            settings["on_in_doubt"] = probe
        return Policy(**settings)


def draw_scenario(draws: random.Random) -> Scenario:
    """The scenario of a seed."""
    name = draws.choice((*_OFTEN, *_POLICIES))
    lease_s = draws.choice((2, 4, 10))
    tries = draws.choice((2, 3, 5))
    settings = {
        "lease": f"{lease_s}s",
        "tries": tries,
        "backoff": draws.choice((["500ms"], ["1s", "3s"])),
        "results": draws.choice(("off", "keep")),
        "retention": "1h",
        **_POLICIES[name],
    }
    messages = [_message(draws, number, lease_s) for number in range(draws.randint(1, 6))]
    others = [
        Message(each.id, json.dumps({**each.json(), "other": True}).encode(), key=each.key)
        for each in messages
        if draws.random() < 0.1
    ]
    is_ordered = draws.random() < 0.3
    kinds = [draws.choice(("consumer", "consumer", "once", "claimed")) for _ in range(3)]
    workers = ["consumer"] if is_ordered else kinds[: draws.randint(1, 3)]
    is_calm = draws.random() < 0.2
    refusing = 0.2 if draws.random() < 0.15 else 0.0
    return Scenario(
        policy_name=name,
        settings=settings,
        messages=messages,
        others=others,
        workers=[*workers, "relay"],
        is_ordered=is_ordered,
        blows=_blows(draws),
        store_faults=0.0 if is_calm else draws.choice((0.01, 0.05, 0.15)),
        broker_faults=0.0 if is_calm else draws.choice((0.0, 0.03, 0.1)),
        slow=draws.choice((0.0, 0.01, 0.05)),
        refusing=refusing,
        concurrency=draws.choice((1, 2, 3)),
        window=draws.choice((1, 2, 10)),
        clocks_apart_s=draws.choice((0.0, 5 * 3600.0)),
        limit_s=120.0 + _work_s(messages, tries) + (900.0 if refusing else 0.0),
    )


def _work_s(messages: list[Message], tries: int) -> float:
    """How long one worker is at all of these, if each fails as often as it may."""
    specs = [each.json() for each in messages]
    once_s: float = sum(spec["runs_s"] + spec["steps"] * spec["step_s"] for spec in specs)
    return tries * once_s


def _message(draws: random.Random, number: int, lease_s: float) -> Message:
    runs_s = draws.choice((0.01, 0.2, 1.0, lease_s * 1.5))
    body = {
        "number": number,
        "runs_s": runs_s,
        "fails": draws.choice((0, 0, 0, 0, 1, 2, 99)),
        "error": draws.choice(("plain", "unknown", "retry", "final")),
        "effect_first": draws.random() < 0.5,
        "steps": draws.choice((0, 1, 1, 2)),
        "step_s": draws.choice((0.05, 1.0, lease_s * 0.7)),
        "sends": draws.choice((0, 0, 1, 2)),
    }
    return Message(f"m{number}", json.dumps(body).encode(), key=draws.choice("ab"))


def _blows(draws: random.Random) -> list[tuple[float, str]]:
    count = draws.randint(0, 14)
    kinds = [draws.choice((*STRIKES, *BLOWS)) for _ in range(count)]
    return sorted((draws.uniform(0.0, FAULTS_S * 0.9), kind) for kind in kinds)
