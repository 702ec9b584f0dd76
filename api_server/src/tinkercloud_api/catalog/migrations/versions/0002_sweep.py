"""Deleted runs whose heads' last words are still to be swept up."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("training_runs", schema=None) as batch_op:
        batch_op.add_column(
            sa.Column("is_swept", sa.Boolean(), nullable=False, server_default=sa.false())
        )
        batch_op.create_index("training_runs_to_sweep", ["is_swept", "deleted_at"], unique=False)


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("training_runs", schema=None) as batch_op:
        batch_op.drop_index("training_runs_to_sweep")
        batch_op.drop_column("is_swept")
