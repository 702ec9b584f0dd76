"""The ledger of usage."""

import sqlalchemy as sa
from alembic import op

revision = "0009_usage"
down_revision = "0008_server_secrets"
branch_labels = None
depends_on = None

_TOKENS = ("trained", "forward", "prefill", "cached", "sampled")


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "usage_hours",
        sa.Column("generation", sa.String(), nullable=False),
        sa.Column("hour", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        *[sa.Column(f"{name}_tokens", sa.BigInteger(), nullable=False) for name in _TOKENS],
        sa.Column("engine_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("generation", "hour", "owner", "session_id", "model_id"),
    )
    op.create_index("usage_hours_by_owner", "usage_hours", ["owner", "hour"], unique=False)


def downgrade() -> None:
    """Undo."""
    op.drop_table("usage_hours")
