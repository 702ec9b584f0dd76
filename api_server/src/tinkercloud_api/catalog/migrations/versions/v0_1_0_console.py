"""The curves of runs, and the sessions of browsers in the console."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_console"
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
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "stride", "number"),
    )
    op.create_table(
        "logged_values",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "name", "step"),
    )
    op.create_table(
        "console_tokens",
        sa.Column("token_hash", sa.String(), nullable=False),
        sa.Column("is_link", sa.Boolean(), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("session_ends_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("token_hash"),
    )
    for column in ("key_id", "expires_at"):
        op.create_index(f"ix_console_tokens_{column}", "console_tokens", [column])
