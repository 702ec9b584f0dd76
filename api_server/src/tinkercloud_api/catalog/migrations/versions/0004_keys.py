"""Expiry, last use and origin of API keys."""

import sqlalchemy as sa
from alembic import op

revision = "0004_keys"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.add_column(sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))
        batch_op.add_column(sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True))
        batch_op.add_column(
            sa.Column("is_bootstrap", sa.Boolean(), nullable=False, server_default=sa.false())
        )
    # How earlier releases registered the key of the settings.
    keys = sa.table(
        "api_keys",
        sa.column("name", sa.String),
        sa.column("owner", sa.String),
        sa.column("role", sa.String),
        sa.column("is_bootstrap", sa.Boolean),
    )
    op.execute(
        keys.update()
        .where(keys.c.name == "bootstrap", keys.c.owner == "bootstrap", keys.c.role == "admin")
        .values(is_bootstrap=True)
    )


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.drop_column("is_bootstrap")
        batch_op.drop_column("last_used_at")
        batch_op.drop_column("expires_at")
