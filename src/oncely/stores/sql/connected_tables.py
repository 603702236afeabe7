"""Access: runs the statements that are the same on all databases."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from oncely.stores.sql.dialect import Dialect, SqlConnection

L_co = TypeVar("L_co", bound=SqlConnection, covariant=True)


class ConnectedTables(Generic[L_co]):
    """The tables of a ledger through one connection."""

    def __init__(self, dialect: Dialect, link: L_co) -> None:
        self.dialect = dialect
        self.link = link

    def run(self, statement: str, values: Mapping[str, Any] | None = None) -> Any:
        """As `Dialect.run`."""
        return self.dialect.run(self.link, statement, values)
