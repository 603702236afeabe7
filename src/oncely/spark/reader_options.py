"""The options of a read of `format("oncely")`, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from oncely.core.record import State
from oncely.locations import LedgerAddress, absolute_location, check_shared
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
    """The checked options of a read of `format("oncely")`; sent to the executors."""

    ledger: str = field(repr=False)
    """As in SinkOptions."""
    table: str
    schema: str | None
    consumer: str | None
    """The consumer of the records; None for all."""
    state: State | None
    """The state of the records; None for all."""
    partitions: int
    """The most ranges of keys into which the records are split."""

    @property
    def address(self) -> LedgerAddress:
        """Where the ledger is."""
        return LedgerAddress(self.ledger, self.table, self.schema)


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
    # The status in the table is accepted, too.
    stored = {state.value: state.word for state in State}
    return None if given is None else words[choice("state", stored.get(given, given), words)]
