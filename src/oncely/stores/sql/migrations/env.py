"""How Alembic runs the migrations here: on the connection that it is given, or as text."""

from alembic import context

attributes = context.config.attributes
name, found = attributes["name"], attributes["found"]
context.configure(
    connection=attributes["connection"],
    version_table=name.version_table,
    version_table_schema=name.schema,
    as_sql=context.is_offline_mode(),
    literal_binds=context.is_offline_mode(),
    # Where the database can change a schema in a transaction, that is open already.
    transactional_ddl=False,
)
if found.lacks_schema:
    # Alembic's own table comes first, and is in it as well.
    context.execute(f'CREATE SCHEMA "{name.schema}"')
context.run_migrations(name=name, found=found)
