"""The words for where a record stands, as people type and read them."""

from collections.abc import Mapping

from oncely.core.errors import ConfigError
from oncely.core.record import Record, State
from oncely.core.shown import utc

IN_DOUBT = "in doubt"
EXHAUSTED = "exhausted"
FOR_SENDER = "waits for its sender"
"""An operator has allowed it to run again; as Record says."""
STATES: Mapping[str, State] = {
    **{state.word: state for state in State},
    IN_DOUBT: State.PROCESSING,
    EXHAUSTED: State.FAILED,
    FOR_SENDER: State.FAILED,
}
"""The words for where a record stands, and the state that each is about."""
RESETTABLE = ("failed", EXHAUSTED, IN_DOUBT)
"""The words for the records that may be retried."""


def state_word(text: str, where: str = "state") -> str:
    """The word of `STATES` that somebody has typed. Raises ConfigError for any other text."""
    word = text.replace("-", " ").replace("_", " ")
    stored = {state.value: state.word for state in State}
    word = stored.get(word, word)
    if word not in STATES:
        raise ConfigError(f"{where}: {text!r} is none of {', '.join(STATES)}")
    return word


def word_with_lease(record: Record) -> str:
    """The word for its state and, while it is processed, until when."""
    if record.waits_for_sender:
        return "waiting for its sender"
    if record.state is not State.PROCESSING:
        return record.state.word
    end = "without an end" if record.lease_until is None else f"until {utc(record.lease_until)}"
    return f"{record.state.word} (lease {end})"
