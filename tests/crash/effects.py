"""Effects of what is killed: a line each, which says of which message it is and of which run."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from oncely.core.record import Claim


def bodies(message_id: str, run: str) -> Sequence[dict[str, Any]]:
    """What a run sends."""
    return [{"of": message_id, "position": position, "run": run} for position in range(2)]


def line_of(claim: Claim, run: str, deferred: Sequence[str]) -> str:
    """The effect of a run under `claim`, which sends messages under these ids."""
    return json.dumps(
        {
            "id": claim.key.message_id,
            "fence": claim.fence,
            "attempt": claim.attempts,
            "pid": os.getpid(),
            "run": run,
            "deferred": list(deferred),
        }
    )


def append(log: Path, line: str) -> None:
    """An effect outside the database."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def append_once(log: Path, line: str, idempotency_key: str) -> None:
    """The same, by a service that does nothing again under a key that it knows."""
    if not log.exists() or idempotency_key not in log.read_text():
        append(log, json.dumps({**json.loads(line), "key": idempotency_key}))


def insert(connection: Connection, line: str) -> None:
    """An effect in the same database."""
    connection.execute(text("INSERT INTO effects (line) VALUES (:line)"), {"line": line})
