"""Records in a relational database: SQLite, PostgreSQL, MariaDB and MySQL."""

from oncely.stores.sql.sql_store import SqlStore

__all__ = ["SqlStore"]
