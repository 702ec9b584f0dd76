"""Secrets that all servers of one catalog share, such as the one that signs URLs."""

import sqlalchemy as sa
from alembic import op

revision = "0008_server_secrets"
down_revision = "0007_uploads"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "server_secrets",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("server_secrets")
