"""The storage of checkpoints by day."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_stored_days"
down_revision = "0.1.0_audit_chain"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    key = ("day", "owner", "project_id", "base_model")
    op.create_table(
        "stored_days",
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.String(), nullable=False) for name in key[1:]),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*key),
    )
