"""Probing: what a user's probe says of a message in doubt."""

from typing import Any, NamedTuple, get_args

from oncely._util.event_log import EventLog
from oncely.core.errors import describe
from oncely.core.message import Message
from oncely.core.policy import Finding

_log = EventLog(__name__)
_TOLD = 200
"""Characters of an unusable answer."""


class ProbeAnswer(NamedTuple):
    """What a probe has found out."""

    finding: Finding
    error: str | None
    """Why it could not tell, where it raised or gave something else than a finding."""


def probe_answer(probe: Any, message: Message) -> ProbeAnswer:
    """What `probe` says of a message; unknown where it cannot tell."""
    try:
        finding = probe(message)
    except Exception as error:  # noqa: BLE001 - what a user's probe may raise is not known.
        _log.exception(
            "the probe failed for message '%(message_id)s': %(reason)s; that counts as \"unknown\"",
            extra={"event": "probe_failed", "message_id": message.id},
        )
        return ProbeAnswer("unknown", describe(error))
    if finding not in get_args(Finding):
        told = describe(repr(finding), _TOLD)
        _log.error(
            "the probe returned %(answer)s for message '%(message_id)s': return \"happened\", "
            '"not_happened" or "unknown"',
            extra={"event": "probe_answer_unusable", "message_id": message.id, "answer": told},
        )
        return ProbeAnswer("unknown", f"it returned {told}")
    return ProbeAnswer(finding, None)
