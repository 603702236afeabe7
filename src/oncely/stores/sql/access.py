"""Access: runs the statements that are the same on all databases."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from oncely.stores.sql.database import Database, Link

L_co = TypeVar("L_co", bound=Link, covariant=True)


class Access(Generic[L_co]):
    """The tables of a ledger through one connection."""

    def __init__(self, database: Database, link: L_co) -> None:
        self.database = database
        self.link = link

    def run(self, statement: str, values: Mapping[str, Any] | None = None) -> Any:
        """As `Database.run`."""
        return self.database.run(self.link, statement, values)
