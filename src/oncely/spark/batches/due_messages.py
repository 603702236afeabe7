"""Due messages: those that wait in the ledger for a batch, such as retried dead letters."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from oncely.core.durations import Duration
from oncely.core.waiting import WaitingMessage, retries_of
from oncely.ledger import Ledger

_MOST = 1_000
"""The most messages in one batch."""
_SCHEMA = (
    "id string, type string, body binary, headers map<string, string>, source string,"
    " time timestamp, key string"
)


def with_due(messages: DataFrame, ledger: Ledger, consumer: str, hold: Duration) -> DataFrame:
    """`messages`, and the consumer's due messages in the message columns that `messages` has. No
    other worker is given the due messages for the time of `hold`.
    """
    queue = retries_of(consumer)
    # To look is a cheap read; to take is a write.
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
