"""Judges a run by what the provider saw: every good message sent, and none of them twice.

Imports nothing of oncely, and finds out by itself which messages are good: a judge must not ask
the accused.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
MAX_ID_LENGTH = 255


class Audit(NamedTuple):
    """What the log says beside what it should say. None: not known, as there are no messages."""

    effects: Counter[str]
    """How often each message was sent, by message id."""
    unreadable: int
    """Lines of the log that are no effect."""
    good: set[str] | None = None
    stated: int | None = None
    """The number of good messages that the generator says it wrote."""

    @property
    def missing(self) -> int:
        """Good messages that were never sent."""
        return len((self.good or set()) - self.effects.keys())

    @property
    def unexpected(self) -> int:
        """Messages sent that are not among the good ones."""
        return 0 if self.good is None else len(self.effects.keys() - self.good)

    @property
    def most(self) -> int:
        """The most effects that any one message had."""
        return max(self.effects.values(), default=0)

    def faults(self, *, allow_missing: bool = False) -> list[str]:
        """Everything that is wrong, one line each; empty when the run was faultless."""
        found = {
            "messages sent more than once": sum(n > 1 for n in self.effects.values()),
            "good messages never sent": 0 if allow_missing else self.missing,
            "messages sent that are none of the good ones": self.unexpected,
            "lines of the log that are no effect": self.unreadable,
        }
        faults = [f"{what}: {number}" for what, number in found.items() if number]
        if self.stated is not None and self.good is None:
            faults.append(f"good messages expected: {self.stated}, but their folder is not there")
        elif self.stated is not None and self.good is not None and self.stated != len(self.good):
            faults.append(f"good messages expected: {self.stated}, in the folder: {len(self.good)}")
        return faults


def audit(log: Path, messages: Path) -> Audit:
    """Compare the provider's log with the messages; either may be absent. Writes nothing."""
    effects, unreadable = _read_log(log)
    good = set(_good_ids(messages)) if messages.is_dir() else None
    return Audit(effects, unreadable, good, _stated(messages))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def _parse(line: bytes) -> dict[str, Any]:
    """The JSON object on this line; an empty one where it is none."""
    try:
        value = json.loads(line.decode())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _read_log(log: Path) -> tuple[Counter[str], int]:
    if not log.is_file():
        return Counter(), 0
    ids = Counter(_parse(line).get("message_id") for line in _lines(log))
    unreadable = ids.pop(None, 0)
    return Counter({str(message_id): number for message_id, number in ids.items()}), unreadable


def _good_ids(messages: Path) -> Iterator[str]:
    for path in sorted(messages.glob("*.jsonl")):
        for line in _lines(path):
            delivery = _parse(line)
            if _is_good(delivery):
                yield delivery["id"]


def _is_good(delivery: dict[str, Any]) -> bool:
    """Whether this delivery has a usable id and somebody to send to."""
    message_id, payload = delivery.get("id"), delivery.get("payload")
    if not isinstance(message_id, str) or not isinstance(payload, dict):
        return False
    short = len(message_id) <= MAX_ID_LENGTH
    return bool(message_id.strip() and short and "\0" not in message_id and payload.get("to"))


def _stated(messages: Path) -> int | None:
    path = messages.with_name(f"{messages.name}.expected.json")
    return int(json.loads(path.read_bytes())["unique"]) if path.is_file() else None


def _print_table(result: Audit) -> None:
    known = result.good is not None
    rows = {
        "effects": result.effects.total(),
        "unique messages": len(result.effects),
        "messages expected": len(result.good) if result.good is not None else "not known",
        "missing": result.missing if known else "not known",
        "unexpected": result.unexpected if known else "not known",
    }
    for name, value in rows.items():
        print(f"{name:<18}{value:>10}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and what is wrong; 0 when every good message was sent, and sent once."""
    parser = argparse.ArgumentParser(description="Was every good message sent, and none twice?")
    log = os.environ.get("NOTIFICATIONS_PROVIDER_LOG") or HERE / "out" / "provider.jsonl"
    parser.add_argument("--log", type=Path, default=Path(log), help="the provider's log")
    parser.add_argument("--messages", type=Path, default=HERE / "messages", help="their folder")
    parser.add_argument("--allow-missing", action="store_true", help="the run is not over yet")
    options = parser.parse_args(arguments)
    result = audit(options.log, options.messages.absolute())
    faults = result.faults(allow_missing=options.allow_missing)
    _print_table(result)
    for fault in faults:
        print(f"wrong: {fault}")
    print(f"effects per message: max {result.most}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
