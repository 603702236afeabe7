"""How Alembic runs the migrations here: on the connection that it is given, or as text."""

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    version_table=attributes["name"].version_table,
    version_table_schema=attributes["name"].schema,
    as_sql=context.is_offline_mode(),
    literal_binds=context.is_offline_mode(),
    # Where the schema can be changed in a transaction, ours is open already.
    transactional_ddl=False,
)
context.run_migrations(name=attributes["name"], found=attributes["found"])
