"""Which checkpoint a sampling session was made from, among those of one path."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("sampling_sessions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("saved_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("sampling_sessions", schema=None) as batch_op:
        batch_op.drop_column("saved_at")
