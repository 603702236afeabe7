"""The names of tables; in Redis, the prefix of keys."""

import hashlib
import re
from typing import Literal, NamedTuple

from oncely.core.errors import ConfigError

TABLE_NAME = "processed_messages"
Program = Literal["worker", "relay", "operator", "reader", "spark"]
"""A kind of program, by what it does with a ledger."""


def in_words(program: Program) -> str:
    """The program in a sentence."""
    return "Spark" if program == "spark" else f"a {program}"


UNIQUE_NAME = "uq_message_provider"

_MAX_BYTES = 63
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class TableName(NamedTuple):
    """The name of the table of records, from which those of the other tables are made."""

    table: str = TABLE_NAME
    schema: str | None = None

    def beside(self, purpose: str) -> str:
        """The table of that purpose, a field of SqlTables: "waiting", "steps", "consumers"..."""
        if self.table != TABLE_NAME:
            return _shortened(f"{self.table}_{purpose}")
        return "waiting_messages" if purpose == "waiting" else f"message_{purpose}"

    @property
    def unfinished(self) -> str:
        """The index of the records that are not completed."""
        return _shortened(f"{self.table}_unfinished")

    @property
    def version_table(self) -> str:
        """The table that says which migrations have run."""
        # Alembic names its primary key with four bytes more.
        return _shortened(f"{self.table}_version", _MAX_BYTES - len("_pkc"))

    @property
    def unique(self) -> str:
        """The constraint that keys are unique. In PostgreSQL it names an index as well, and indexes
        of one schema need different names.
        """
        return UNIQUE_NAME if self.table == TABLE_NAME else _shortened(f"uq_{self.table}")

    def index_of_waiting(self, purpose: str) -> str:
        """An index, or a constraint, of the table of messages that wait."""
        return _shortened(f"{self.beside('waiting')}_{purpose}")

    def checked(self) -> "TableName":
        """Itself. Raises ConfigError where a name is not an identifier, or over 63 bytes long."""
        for what, name in (("table", self.table), ("schema", self.schema)):
            if name is None and what == "schema":
                continue
            if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
                raise ConfigError(
                    f"{what}: {name!r} is not a name for a {what}; use letters, digits and "
                    f'underscores, such as "{TABLE_NAME}"'
                )
            if len(name) > _MAX_BYTES:
                raise ConfigError(
                    f"{what}: {name!r} is {len(name)} bytes long; use at most {_MAX_BYTES}"
                )
        return self


def _shortened(name: str, length: int = _MAX_BYTES) -> str:
    """`name`, its end replaced by a digest of the whole where it is longer than `length`."""
    if len(name) <= length:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name[: length - len(digest) - 1]}_{digest}"
