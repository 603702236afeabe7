"""The pipeline file: read, checked, paths made absolute. Every error names the file and the key."""

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oncely.core.durations import seconds
from oncely.core.errors import ConfigError, MessageError
from oncely.core.policy import POLICY_FIELDS
from oncely.lifecycle.wrapping import check_called
from oncely.locations import LedgerAddress, absolute_location, open_named_ledger, read_secret
from oncely.spark.option_values import as_text, unknown
from oncely.spark.sink.paths import check_apart, check_scheme, check_writable
from oncely.spark.sink.sink_options import (
    Mode,
    check_on_driver,
    import_function,
    read_options,
    read_policy,
)
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import sqlite_file

INNER = "oncely_inner"
"""A column that expressions of the file do not see: what is known of a row besides."""
Scalar = str | int | float | bool
Text = Annotated[str, Field(min_length=1)]


class Table(BaseModel):
    """A table of the file: unknown keys and values of other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PipelineTable(Table):
    """The table [pipeline]."""

    name: Text
    consumer: Text
    ledger: Text
    ledger_table: Text = TABLE_NAME
    ledger_schema: Text | None = None
    handler: Text | None = None
    handler_batch: Text | None = None
    """Called on the driver with a batch, instead of a handler."""
    mode: Mode = "leased"
    table: Text | None = None
    """In mode `rows`: the table for the columns of [columns], in the ledger's database, or
    "delta:PATH", or "iceberg:CATALOG.NAMESPACE.TABLE"."""
    upsert: list[Text] = []
    """In mode `rows`: the key by which rows replace existing rows."""
    sequence_by: Text | None = None
    """With `upsert`: the column by which an existing row may be newer, and is not replaced."""
    transport: Text | None = None
    """The transport that sends deferred messages; without it, a relay sends them."""
    trigger: str = "available_now"
    checkpoint: Text
    quarantine: Text
    staging: Text | None = None
    """The folder of a batch until it is settled; by default beside the quarantine."""
    archive: Text | None = None
    chunk: int | None = Field(default=None, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    """How many handlers a task runs at a time."""
    partitions: int | None = Field(default=None, ge=1)
    """How many tasks a batch has."""
    writers: int | None = Field(default=None, ge=1)
    """The most tasks that write at a time."""
    max_failures: float | None = Field(default=None, ge=0, le=1)
    """The share of a batch that may fail; if more fail, the run ends. Without it, the run ends when
    nearly all messages fail for one reason."""


class SourceTable(Table):
    """The table [source]."""

    format: Text
    path: Text | None = None
    options: dict[str, Scalar] = {}
    schema_: str | None = Field(default=None, alias="schema")


class MessageTable(Table):
    """The table [message]: Spark SQL expressions over the source's columns."""

    id: Text
    type: str | None = None
    body: str | None = None
    headers: str | None = None
    source: str | None = None
    time: str | None = None
    key: str | None = None


class _PipelineFile(Table):
    pipeline: PipelineTable
    source: SourceTable
    message: MessageTable = MessageTable(
        **{name: f"{INNER}.message.{name}" for name in MessageTable.model_fields}
    )
    """By default that of a record of Kafka, as the transport `kafka://` would receive it."""
    columns: dict[Text, Text] = {}
    """In mode `rows`: the columns of the table, each a Spark SQL expression."""
    policy: dict[str, Any] = {}
    spark: dict[str, Scalar] = {}


_SINKS_OPTIONS = {
    *("consumer", "handler", "handler_batch", "mode", "table", "upsert", "sequence_by"),
    *("ledger_table", "ledger_schema", "chunk", "concurrency", "max_failures"),
}
"""The keys of [pipeline] that the sink has as options, with the same meaning."""
_FOLDERS = ("quarantine", "staging", "archive")
_SPARKS_WAY = re.compile(r'\.option\("(\w+)", ("[^"]*")\)')


class PipelineConfig:
    """A pipeline file that has been checked; its paths are absolute."""

    def __init__(self, file: Path, tables: _PipelineFile) -> None:
        self.file = file
        self.folder = file.absolute().parent
        self.source = tables.source
        self.message = tables.message
        self.has_records = "message" not in tables.model_fields_set
        """Whether Kafka's records are messages by themselves."""
        if self.has_records and self.source.format != "kafka":
            raise self.wrong("[message]", "is missing")
        if self.has_records and tables.pipeline.mode == "rows":
            self.message = MessageTable(id=tables.message.id)
        path = self.source_path = tables.source.path and self._absolute(tables.source.path)
        is_pattern = path and (has_magic(path) or "{" in path)
        if path and "://" not in path and not is_pattern and not Path(path).exists():
            raise self.wrong("[source] path", f"{path!r} does not exist")
        # `file:` may be meant literally: many formats name their files so.
        with self.checking("[source] options"):
            self.source_options = {
                name: read_secret(value, name) if value.startswith("env:") else value
                for name, value in as_text(tables.source.options).items()
            }
        if self.has_records:
            self.source_options["includeHeaders"] = "true"
        self.pipeline = pipeline = tables.pipeline
        self.spark = as_text(tables.spark)
        self.columns = tables.columns
        try:
            read_policy(tables.policy, str(self.folder))
        except ConfigError as error:
            raise ConfigError(f"{self.file}: [policy] {error}") from error
        location = self._located("ledger", pipeline.ledger) or ""
        self.address = LedgerAddress(location, pipeline.ledger_table, pipeline.ledger_schema)
        self.transport = self._located("transport", pipeline.transport)
        self.checkpoint = self._folder("checkpoint", pipeline.checkpoint) or ""
        self.archive = self._folder("archive", pipeline.archive)
        places = {
            "ledger": location,
            "transport": self.transport,
            "quarantine": self._folder("quarantine", pipeline.quarantine),
            "staging": self._folder("staging", pipeline.staging),
            "archive": self.archive,
            "handler_path": self.folder,
        }
        if pipeline.table and pipeline.table.startswith("delta:"):
            places["table"] = f"delta:{self._absolute(pipeline.table.removeprefix('delta:'))}"
        options = {**pipeline.model_dump(include=_SINKS_OPTIONS), **places}
        self.sink_options = as_text(options) | as_text(tables.policy)
        """The options of the sink that the file sets."""
        in_file = location.removeprefix("sqlite:///")
        apart = {
            "[pipeline] ledger": None if in_file == location else in_file,
            **{f"[pipeline] {name}": self.sink_options.get(name) for name in _FOLDERS},
            "[pipeline] checkpoint": self.checkpoint,
            "[source] path": self.source_path,
        }
        try:
            check_apart(apart)
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None
        self._check_sink()
        self._check_columns()
        self._check_places()
        self.trigger = self._trigger()

    def wrong(self, key: str, text: str) -> ConfigError:
        """The error for `key` of this file."""
        return ConfigError(f"{self.file}: {key}: {text}")

    @contextmanager
    def checking(self, key: str, own: str = "") -> Iterator[None]:
        """Report errors in the block as errors of `key` of this file, in place of their `own`
        beginning.
        """
        try:
            yield
        except (ConfigError, MessageError) as error:
            raise self.wrong(key, str(error).removeprefix(own)) from error

    def _absolute(self, path: str) -> str:
        return path if "://" in path else str(self.folder / path)

    def _located(self, key: str, address: str | None) -> str | None:
        """The place of a ledger or transport: a file's URL is made absolute, and other secrets are
        not kept.
        """
        if address is None:
            return None
        with self.checking(f"[pipeline] {key}", "ledger: "):
            location = absolute_location(address, self.folder)
            url = read_secret(location, "ledger")
            return absolute_location(url, self.folder) if url.startswith("sqlite:") else location

    def _folder(self, key: str, path: str | None) -> str | None:
        folder = None if path is None else self._absolute(path)
        if folder and "://" not in folder and Path(folder).exists() and not Path(folder).is_dir():
            raise self.wrong(f"[pipeline] {key}", f"{folder!r} is a file; name a folder")
        return folder

    def _check_sink(self) -> None:
        """Check what the sink checks, before Spark starts, and with the URLs that are secret."""
        if self.pipeline.sequence_by and not self.pipeline.upsert:
            raise self.wrong("[pipeline] sequence_by", 'wants a key; write upsert = ["account"]')
        if self.archive is not None:
            with self.checking("[pipeline] archive"):
                check_scheme(self.archive)
        options = self.sink_options
        urls = {
            name: read_secret(options[name], name)
            for name in ("ledger", "transport")
            if name in options
        }
        try:
            check_on_driver(read_options(options | urls))
        except ConfigError as error:
            key, _, text = str(error).removeprefix("option ").partition(": ")
            table = "policy" if key in POLICY_FIELDS else "pipeline"
            raise self.wrong(f"[{table}] {key}", _SPARKS_WAY.sub(r"\1 = \2", text)) from error
        batch = self.pipeline.handler_batch
        if batch is not None:
            with self.checking("[pipeline] handler_batch", "handler_batch: "):
                function = import_function(batch, "handler_batch", str(self.folder))
                check_called(function, "handler_batch", ("messages", "batch_key"))

    def _check_columns(self) -> None:
        if self.pipeline.mode != "rows":
            if self.columns:
                raise self.wrong("[columns]", 'is for mode = "rows"')
            return
        if not self.columns:
            raise self.wrong("[columns]", 'is missing; write a line such as amount = "amount"')
        if "id" in self.columns:
            raise self.wrong("[columns] id", "is the message's, under [message]; drop it here")
        for name in self.message.model_dump(exclude_none=True):
            if name != "id":
                raise self.wrong(f"[message] {name}", 'mode = "rows" takes it under [columns]')

    def _check_places(self) -> None:
        """Open the ledger, whose folder is created, and write into the folders."""
        with self.checking("[pipeline] ledger", "ledger: "):
            if self.address.location.startswith("sqlite:"):
                file = sqlite_file(self.address.location)
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    text = f"{error.filename!r} cannot be made: {error.strerror}"
                    raise ConfigError(text) from error
                if file.is_dir():
                    raise ConfigError(f"{str(file)!r} is a folder; name a file")
            open_named_ledger(*self.address)
        if "://" not in self.checkpoint:
            # Only Spark can check a URI.
            with self.checking("[pipeline] checkpoint"):
                check_writable(self.checkpoint)
        if "staging" in self.sink_options:
            with self.checking("[pipeline] staging"):
                check_writable(self.sink_options["staging"])

    def _trigger(self) -> dict[str, Any]:
        """The trigger as Spark's keyword arguments."""
        match self.pipeline.trigger:
            case "available_now":
                return {"availableNow": True}
            case "once":
                return {"once": True}
            case interval:
                try:
                    length_s = seconds(interval, "trigger")
                except ConfigError as error:
                    raise self.wrong(
                        "[pipeline] trigger",
                        f'{interval!r} is not one; write "available_now", "once" or a time ("5s")',
                    ) from error
                return {"processingTime": f"{int(length_s * 1000)} milliseconds"}


def read_config(
    file: Path, ledger: str | None = None, table: str | None = None, schema: str | None = None
) -> PipelineConfig:
    """Read and check a pipeline file; `ledger`, and its `table` and `schema`, override the file's
    values.

    Raises ConfigError, one line that names the file and the key.
    """
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    typed = {"ledger": ledger, "ledger_table": table, "ledger_schema": schema}
    if isinstance(document.get("pipeline"), dict):
        document["pipeline"] |= {name: each for name, each in typed.items() if each is not None}
    try:
        return PipelineConfig(file, _PipelineFile.model_validate(document))
    except ValidationError as error:
        raise ConfigError(f"{file}: {first_error(error)}") from error


def first_error(error: ValidationError) -> str:
    """The first error of a file, and its place."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "str"]
    where = f"[{path[0]}]" + (f" {'.'.join(path[1:])}" if path[1:] else "")
    if first["type"] == "missing":
        return f"{where}: is missing"
    if first["type"] == "extra_forbidden" and len(path) == 1:
        return unknown(where, [f"[{name}]" for name in _keys([])], "table")
    if first["type"] == "extra_forbidden":
        return f"{where.removesuffix(path[-1])}{unknown(path[-1], _keys(path[:-1]))}"
    if path[0] == "spark" and first["type"].endswith("_type"):
        return f'{where}: write a name with dots in quotes, such as "spark.executor.memory" = "2g"'
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"


def _keys(path: list[str]) -> list[str]:
    table: type[BaseModel] = _PipelineFile
    for name in path:
        annotation = table.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        table = annotation
    return [field.alias or name for name, field in table.model_fields.items()]
