"""The options of a read of `format("oncely")`, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from oncely.core.record import State
from oncely.locations import LedgerPlace, absolute_location, check_shared
from oncely.spark.option_values import (
    check_consumer,
    choice,
    refuse_unknown,
    required,
    whole_number,
)
from oncely.stores.names import TABLE_NAME

_DEFAULT_PARTITIONS = 8


@dataclass(frozen=True)
class ReaderOptions:
    """What reading `format("oncely")` was told, checked; travels to the executors."""

    ledger: str = field(repr=False)
    """As SinkOptions has it."""
    table: str
    schema: str | None
    consumer: str | None
    """Whose records; None for all."""
    state: State | None
    """Which records; None for all."""
    partitions: int
    """Into how many ranges of keys the records are parted, at most."""

    @property
    def place(self) -> LedgerPlace:
        """Where the ledger is."""
        return LedgerPlace(self.ledger, self.table, self.schema)


def read_reader_options(options: Mapping[str, str]) -> ReaderOptions:
    """Check the options of a read. Raises ConfigError, which names the option."""
    given = {name.lower(): value for name, value in options.items()}
    refuse_unknown(given, [each.name for each in fields(ReaderOptions)])
    return ReaderOptions(
        ledger=check_shared(
            absolute_location(required(given, "ledger", "sqlite:////var/lib/ledger.db"))
        ),
        table=given.get("table", TABLE_NAME),
        schema=given.get("schema"),
        consumer=check_consumer(given["consumer"]) if "consumer" in given else None,
        state=_state(given.get("state")),
        partitions=whole_number(given, "partitions", _DEFAULT_PARTITIONS),
    )


def _state(given: str | None) -> State | None:
    words = {state.word: state for state in State}
    # A state may be written as the table has it, too.
    stored = {state.value: state.word for state in State}
    return None if given is None else words[choice("state", stored.get(given, given), words)]
