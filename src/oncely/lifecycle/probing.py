"""Probing: what a user's probe says of a message in doubt."""

import logging
from typing import Any, get_args

from oncely.core.errors import describe
from oncely.core.message import Message
from oncely.core.policy import Finding

_log = logging.getLogger(__name__)


def asked_probe(probe: Any, message: Message) -> Finding:
    """What `probe` says of a message; unknown where it cannot tell."""
    try:
        finding: Finding = probe(message)
    except Exception:  # noqa: BLE001 - what a user's probe may raise is not known.
        _log.exception("probe_failed")
        return "unknown"
    if finding not in get_args(Finding):
        _log.error("probe_answer_unusable", extra={"answer": describe(repr(finding), 200)})
        return "unknown"
    return finding
