"""Why the manifest of a checkpoint can't be read."""

import sqlalchemy as sa
from alembic import op

revision = "0005_damage"
down_revision = "0004_keys"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.add_column(sa.Column("damage", sa.String(), nullable=True))


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.drop_column("damage")
