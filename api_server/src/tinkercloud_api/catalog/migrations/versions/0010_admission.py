"""Which runs have started under the limits of their tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0010_admission"
down_revision = "0009_usage"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column(
        "training_runs", sa.Column("admitted_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.create_table(
        "tenant_turns",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("tenant"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("tenant_turns")
    op.drop_column("training_runs", "admitted_at")
