"""A pretend provider of SMS, e-mail and push: it sends nothing, and logs what it was asked for.

`audit.py` judges by that log, so nothing here makes messages unique: asked twice, it sends twice.
"""

import json
import os
from pathlib import Path

LOG_VARIABLE = "NOTIFICATIONS_PROVIDER_LOG"
"""The environment variable that says where the log is; out/provider.jsonl beside this file else."""


def log_path() -> Path:
    """Where the effects are logged."""
    named = os.environ.get(LOG_VARIABLE)
    return Path(named) if named else Path(__file__).resolve().parent / "out" / "provider.jsonl"


def send(
    channel: str, to: str, text: str, *, message_id: str, fence: int, attempt: int, key: str
) -> None:
    """Send `text` to `to`: one more line in the log. Raises OSError where it cannot be written.

    `key` is the idempotency key, by which a real provider would refuse a repetition. Recipient
    and text stay out of the log: they belong to somebody.
    """
    del to, text
    effect = {
        "message_id": message_id,
        "channel": channel,
        "fence": fence,
        "attempt": attempt,
        "pid": os.getpid(),
        "idempotency_key": key,
    }
    _append(log_path(), json.dumps(effect).encode() + b"\n")


def _append(path: Path, line: bytes) -> None:
    """Add `line` in one write, so that lines of several processes never mix."""
    log = _open_log(path)
    try:
        if os.write(log, line) != len(line):
            raise OSError(f"{path}: only a part of a line was written; is the disk full?")
    finally:
        os.close(log)


def _open_log(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)
