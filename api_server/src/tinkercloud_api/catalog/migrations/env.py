"""Alembic's environment: runs the migrations over a connection it is given."""

from alembic import context

from tinkercloud_api.catalog.schema.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
