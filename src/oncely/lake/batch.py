"""A batch in one commit that carries its key, and whether it landed: the same for every format."""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from oncely._util.event_log import EventLog
from oncely._util.pauses import pause_s
from oncely.core.errors import ConfigError, ContentionError, MessageError
from oncely.core.ids import check_id
from oncely.core.policy import Finding

Mode = Literal["append", "merge", "overwrite"]
_NEEDS = {"append": (False, False), "merge": (True, False), "overwrite": (False, True)}
"""Whether a mode has `on`, and `where`."""
_INDEX = "__index_level_"
_TRIES = 30
_log = EventLog(__name__)


class Outrun(Exception):
    """Another commit came first, and nothing was committed: look again, and write again."""


class KeyedTable(Protocol):
    """A table whose commits carry keys."""

    name: str

    def find(self, key: str) -> tuple[int | None, datetime | None]:
        """Load the newest state: the commit's mark, if any, and until when keys are forgotten."""


def write_once(call: str, table: KeyedTable, key: str, commit: Callable[[int], None]) -> bool:
    """Commit a batch, unless its key is there; whether this call did.

    `commit`, which is given a mark, raises Outrun if another commit came after the state that was
    loaded, ConfigError for what does not fit; after other errors nobody knows whether it stands.
    """
    token = secrets.randbits(62) + 1
    for tried in range(_TRIES):
        if (found := table.find(key)[0]) is not None:
            return found == token
        try:
            commit(token)
            return True
        except Outrun:
            time.sleep(pause_s(tried, 0.02, 2.0))
        except ConfigError as error:
            # pyiceberg draws tables; the error is one line.
            words = re.sub("[\u2500-\u257f]+", " ", str(error)).split()
            raise ConfigError(f"{call}: {' '.join(words)}") from error
        except Exception:
            # The answer may be lost, or something may have failed after the commit.
            with suppress(Exception):
                if table.find(key)[0] == token:
                    return True
            raise
    raise ContentionError(f"{call}: other commits to {table.name} came first, {_TRIES} times")


def landed(table: Any, key: str) -> bool:
    """Whether a table (the path or URL of a Delta table, a DeltaTable, a table of pyiceberg) knows
    of a commit with this key. Raises what its library raises where it cannot be reached.
    """
    return _keys_of("landed", table, key).find(key)[0] is not None


def probe(table: Any, key: str, *, sent_at: datetime | None = None) -> Finding:
    """Whether a batch happened, for a probe of `on_in_doubt`.

    "unknown" where the table cannot be reached, which is logged; and where it may have forgotten
    the key of a batch that was sent at `sent_at`, or any key if that is None.
    """
    keys = _keys_of("probe", table, key)
    try:
        token, forgotten_until = keys.find(key)
    except Exception as error:  # noqa: BLE001 - storages and catalogs have errors of their own.
        _log.warning(
            "%(table)s cannot be asked for the batch '%(message_id)s': %(reason)s",
            error=error,
            extra={"event": "table_unreachable", "table": keys.name, "message_id": key},
        )
        return "unknown"
    if token is not None:
        return "happened"
    if forgotten_until is None or (sent_at and sent_at.astimezone(UTC) > forgotten_until):
        return "not_happened"
    return "unknown"


def _keys_of(call: str, table: Any, key: str) -> KeyedTable:
    _check_key(call, key)
    # Neither library is imported for a table of the other one.
    if any(each.__module__ == "pyiceberg.table" for each in type(table).__mro__):
        from oncely.lake.iceberg import IcebergKeys

        return IcebergKeys(table, call)
    from oncely.lake.delta import DeltaKeys

    return DeltaKeys(table, call)


def _check_key(call: str, key: object) -> None:
    try:
        check_id(key, "key")
    except MessageError as error:
        raise ConfigError(f'{call}: {error}; give 1 to 255 characters, such as "a/17"') from error


def checked_rows(call: str, data: Any, key: str, mode: Mode, on: Sequence[str], where: Any) -> Any:
    """The data as a Table, which can be written again when a commit is outrun."""
    import pyarrow as pa

    _check_key(call, key)
    if isinstance(on, str) or _NEEDS.get(mode) != (bool(on), where is not None):
        raise ConfigError(
            f'{call}: mode={mode!r}, on={on!r}, where={where!r}; write mode="append", or '
            'mode="merge", on=["id"], or mode="overwrite", where="day = \'2026-11-27\'"'
        )
    if not hasattr(data, "__arrow_c_stream__"):
        raise ConfigError(f"{call}: data is a {type(data).__name__}; give a pyarrow.Table")
    rows = pa.table(data)
    # An index of pandas that has no name is not a column of the user's.
    return rows.drop_columns([name for name in rows.column_names if name.startswith(_INDEX)])
