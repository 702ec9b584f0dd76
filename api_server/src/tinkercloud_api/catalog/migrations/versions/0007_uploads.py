"""Uploads of adapters, and the base model of each checkpoint."""

import sqlalchemy as sa
from alembic import op

revision = "0007_uploads"
down_revision = "0006_programs"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("manifest", sa.JSON(), nullable=False),
        sa.Column("adapter_config", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("is_finished", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("uploads", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_uploads_owner"), ["owner"], unique=False)
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.add_column(sa.Column("base_model", sa.String(), nullable=True))


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.drop_column("base_model")
    op.drop_table("uploads")
