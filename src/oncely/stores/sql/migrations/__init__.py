"""Numbered migrations of the table, run by Alembic."""
