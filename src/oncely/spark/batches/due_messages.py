"""Due messages: what waits in the ledger for a batch, such as dead letters that may run again."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from oncely.core.durations import Duration
from oncely.core.waiting import WaitingMessage, retries_of
from oncely.ledger import Ledger

_MOST = 1_000
"""In one batch."""
_SCHEMA = (
    "id string, type string, body binary, headers map<string, string>, source string,"
    " time timestamp, key string"
)


def with_due(messages: DataFrame, ledger: Ledger, consumer: str, hold: Duration) -> DataFrame:
    """`messages`, and those of the consumer that are due: as they were kept, in the columns of a
    message that `messages` has. Nobody else is given these for the time of `hold`.
    """
    queue = retries_of(consumer)
    # A look costs nobody anything; to take is a write.
    if ledger.mailbox.free_in_s(queue) != 0:
        return messages
    rows = [_row(each) for each in ledger.mailbox.take(_MOST, hold, queue=queue)]
    due = messages.sparkSession.createDataFrame(rows, _SCHEMA)
    own = {field.name: field.dataType for field in messages.schema.fields}
    columns = [f.col(name).cast(own[name]).alias(name) for name in due.columns if name in own]
    return messages.unionByName(due.select(columns), allowMissingColumns=True)


def _row(taken: WaitingMessage) -> tuple[object, ...]:
    kept = taken.message
    return (kept.id, kept.type, kept.body, dict(kept.headers), kept.source, kept.time, kept.key)
