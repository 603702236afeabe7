"""The file of `oncely reconcile`: a pipeline file, or only a source and its mapping."""

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from oncely.core.errors import ConfigError
from oncely.locations import LedgerPlace, check_shared, read_secret
from oncely.spark.pipeline.config import (
    MessageTable,
    Scalar,
    SourceConfig,
    SourceTable,
    Table,
    first_error,
    read_toml,
)
from oncely.spark.rabbitmq.source_options import FORMAT as RABBITMQ
from oncely.spark.settings import as_text
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import sqlite_file


class _Part(Table):
    # Other keys of a pipeline are checked when it runs.
    model_config = ConfigDict(extra="ignore")


class _PipelinePart(_Part):
    consumer: str | None = None
    ledger: str | None = None
    ledger_table: str = TABLE_NAME
    ledger_schema: str | None = None


class _ReconcileFile(_Part):
    pipeline: _PipelinePart = _PipelinePart()
    source: SourceTable
    message: MessageTable
    policy: dict[str, Any] = Field(default_factory=dict)
    spark: dict[str, Scalar] = Field(default_factory=dict)


class ReconcileConfig(SourceConfig):
    """A file with a source and its mapping, and the consumer whose records to compare."""

    def __init__(
        self,
        file: Path,
        tables: _ReconcileFile,
        ledger: str | None,
        consumer: str | None,
        table: str | None,
        schema: str | None,
    ) -> None:
        super().__init__(file, tables.source, tables.message)
        self.spark = as_text(tables.spark)
        self.compares_bodies = tables.policy.get("on_mismatch") != "ignore"
        name = consumer or tables.pipeline.consumer
        if name is None:
            raise self.wrong("[pipeline] consumer", "is missing; write it there, or add --consumer")
        self.consumer = self.consumer_of(name)
        self.place = LedgerPlace(
            self._ledger(ledger or tables.pipeline.ledger),
            table or tables.pipeline.ledger_table,
            schema or tables.pipeline.ledger_schema,
        )

    def _source_options(self) -> dict[str, str]:
        if self.source.format == RABBITMQ:
            spool = self.source.options.get("spool", "the spool")
            raise self.wrong(
                "[source] format",
                f"{RABBITMQ!r} would take the messages out of the queue; compare its spool, in a"
                f' file of its own: format = "parquet", path = "{spool}", and under [message]'
                ' id = "id", body = "body"',
            )
        return super()._source_options()

    def _ledger(self, ledger: str | None) -> str:
        """Where the ledger is; it must exist."""
        key = "[pipeline] ledger"
        if ledger is None:
            raise self.wrong(key, "is missing; write it there, or add --ledger")
        with self.checking(key, "ledger: "):
            location = self._located(ledger)
            check_shared(read_secret(location, "ledger"))
        if location.startswith("sqlite:") and not sqlite_file(location).is_file():
            # Opening a mistyped name would create an empty file.
            raise self.wrong(key, f"there is no file {str(sqlite_file(location))!r}")
        return location


def read_reconcile_config(
    file: Path,
    ledger: str | None = None,
    consumer: str | None = None,
    table: str | None = None,
    schema: str | None = None,
) -> ReconcileConfig:
    """Read and check a file; `ledger`, its `table` and `schema`, and `consumer` override the file's
    values.

    Raises ConfigError, one line that names the file and the key.
    """
    try:
        tables = _ReconcileFile.model_validate(read_toml(file))
    except ValidationError as error:
        raise ConfigError(f"{file}: {first_error(error)}") from error
    return ReconcileConfig(file, tables, ledger, consumer, table, schema)
