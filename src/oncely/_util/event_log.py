"""The log of events: sentences for people; `extra` has the event's constant name and its values."""

import logging
import sys
from typing import Any

from oncely.core.errors import NAMES, OncelyError, describe, mask_passwords, reason_of
from oncely.core.shown import shown

_LONGEST = 300
"""Characters of an error in a sentence."""


class EventLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose sentences name values of `extra`, such as `%(message_id)s`; `%(reason)s` is
    the text of `error`, or of the error in `exc_info`.

    In a sentence every text is on one line, with passwords masked, but for what names a message.
    `error` may be a text.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(
        self,
        level: int,
        msg: object,
        *_: object,
        error: Any = None,
        exc_info: Any = None,
        extra: Any = None,
        stacklevel: int = 1,
        **_others: Any,
    ) -> None:
        if not self.isEnabledFor(level):
            return
        if error is None and exc_info:
            error = exc_info if isinstance(exc_info, BaseException) else sys.exception()
        values = dict(extra)
        if error is not None:
            # The text of an error: of others than oncely's own with its type, which may say more.
            text = reason_of if isinstance(error, OncelyError) else describe
            values = {"reason": text(error, _LONGEST), **values}
        told = {
            name: _shown(name, value) if isinstance(value, str) else value
            for name, value in values.items()
        }
        self.logger.log(
            level,
            msg,
            told,
            exc_info=exc_info,
            extra=extra,
            stacklevel=stacklevel + 1,
        )


def _shown(name: str, value: str) -> str:
    return shown(value) if name in NAMES else mask_passwords(shown(value))
