"""The words for where a record stands, as people type and read them."""

from collections.abc import Mapping

from oncely.core.errors import ConfigError
from oncely.core.record import State

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
