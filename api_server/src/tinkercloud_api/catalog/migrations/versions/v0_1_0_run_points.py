"""The curves of runs."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_run_points"
down_revision = "0.1.0_chain_and_storage"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "run_points",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("stride", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "stride", "number"),
    )
