"""The pipeline file: read, checked, paths made absolute. Every error names the file and the key."""

import tomllib
from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oncely.core.errors import ConfigError, MessageError
from oncely.core.message import check_id
from oncely.core.policy import seconds
from oncely.locations import check_shared, open_named_ledger, read_secret
from oncely.spark.options import (
    import_function,
    read_policy,
    unknown,
)
from oncely.stores.opening import sqlite_file

Scalar = str | int | float | bool
Text = Annotated[str, Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PipelineTable(_Table):
    """The table [pipeline]."""

    name: Text
    consumer: Text
    ledger: Text
    handler: Text
    mode: Literal["leased"] = "leased"
    trigger: str = "available_now"
    checkpoint: Text
    quarantine: Text
    chunk: int = Field(default=1_000, ge=1)


class SourceTable(_Table):
    """The table [source]."""

    format: Text
    path: Text | None = None
    options: dict[str, Scalar] = {}
    schema_: str | None = Field(default=None, alias="schema")


class MessageTable(_Table):
    """The table [message]: Spark SQL expressions over the source's columns."""

    id: Text
    type: str | None = None
    body: str | None = None
    headers: str | None = None
    source: str | None = None
    time: str | None = None
    key: str | None = None


class _File(_Table):
    pipeline: PipelineTable
    source: SourceTable
    message: MessageTable
    policy: dict[str, Any] = {}
    spark: dict[str, Scalar] = {}


class PipelineConfig:
    """A pipeline file that has been checked; its paths are absolute."""

    def __init__(self, file: Path, tables: _File) -> None:
        self.file = file
        self.folder = file.absolute().parent
        self.pipeline = tables.pipeline
        self.source = tables.source
        self.message = tables.message
        self.spark = {name: as_option(value) for name, value in tables.spark.items()}
        self._check_consumer()
        self._check_policy(tables.policy)
        self.policy_options = {
            name: ",".join(value) if isinstance(value, list) else str(value)
            for name, value in tables.policy.items()
        }
        self._check_handler()
        self.ledger = self._ledger()
        self.source_path = self._source_path()
        self.checkpoint = self._folder("checkpoint", self.pipeline.checkpoint)
        self.quarantine = self._folder("quarantine", self.pipeline.quarantine)
        self.trigger = self._trigger()

    def wrong(self, key: str, text: str) -> ConfigError:
        """The error for `key` of this file."""
        return ConfigError(f"{self.file}: {key}: {text}")

    def _check_consumer(self) -> None:
        try:
            check_id(self.pipeline.consumer, "consumer")
        except MessageError as error:
            raise self.wrong("[pipeline] consumer", str(error)) from error

    def _check_policy(self, table: Mapping[str, Any]) -> None:
        try:
            read_policy(table, str(self.folder))
        except ConfigError as error:
            raise ConfigError(f"{self.file}: [policy] {error}") from error

    def _check_handler(self) -> None:
        key = f"{self.file}: [pipeline] handler"
        import_function(self.pipeline.handler, key, str(self.folder))

    def _ledger(self) -> str:
        """The ledger's URL: a file's made absolute, a server's with its secrets still unread."""
        location = self.pipeline.ledger
        kind, _, name = location.partition(":")
        if kind == "file":
            location = f"file:{self._absolute(name)}"
        try:
            url = read_secret(location, "ledger")
            if url.startswith("sqlite:"):
                location = url = f"sqlite:///{self._with_folder(sqlite_file(url))}"
            check_shared(url)
            open_named_ledger(location)
        except ConfigError as error:
            raise self.wrong("[pipeline] ledger", str(error).removeprefix("ledger: ")) from error
        except OSError as error:
            raise self.wrong(
                "[pipeline] ledger", f"{error.filename!r} cannot be made: {error.strerror}"
            ) from error
        return location

    def _with_folder(self, file: Path) -> Path:
        """`file` beside the pipeline file, its folder made."""
        beside = self.folder / file
        beside.parent.mkdir(parents=True, exist_ok=True)
        if beside.is_dir():
            raise ConfigError(f"{str(beside)!r} is a folder; name a file")
        return beside

    def _folder(self, key: str, path: str) -> str:
        folder = self._absolute(path)
        if "://" not in folder and Path(folder).exists() and not Path(folder).is_dir():
            raise self.wrong(f"[pipeline] {key}", f"{folder!r} is a file; name a folder")
        return folder

    def _source_path(self) -> str | None:
        if self.source.path is None:
            return None
        path = self._absolute(self.source.path)
        if "://" not in path and not _is_pattern(path) and not Path(path).exists():
            raise self.wrong("[source] path", f"{path!r} does not exist")
        return path

    def _absolute(self, path: str) -> str:
        return path if "://" in path else str(self.folder / path)

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
                        f'{interval!r} is none; write "available_now", "once" or a time ("5s")',
                    ) from error
                return {"processingTime": f"{int(length_s * 1000)} milliseconds"}


def _is_pattern(path: str) -> bool:
    return has_magic(path) or "{" in path


def read_config(file: Path, ledger: str | None = None) -> PipelineConfig:
    """Read and check a pipeline file; `ledger` replaces or supplies the one in it.

    Raises ConfigError, one line that names the file and the key.
    """
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is no TOML: {error}") from error
    if ledger is not None and isinstance(document.get("pipeline"), dict):
        document["pipeline"]["ledger"] = ledger
    try:
        return PipelineConfig(file, _File.model_validate(document))
    except ValidationError as error:
        raise ConfigError(f"{file}: {_first_error(error)}") from error


def as_option(value: Scalar) -> str:
    """A TOML value as Spark's options have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_error(error: ValidationError) -> str:
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
        return f'{where}: a name with dots stands in quotes, such as "spark.executor.memory" = "2g"'
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"


def _keys(path: list[str]) -> list[str]:
    table: type[BaseModel] = _File
    for name in path:
        annotation = table.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        table = annotation
    return [field.alias or name for name, field in table.model_fields.items()]
