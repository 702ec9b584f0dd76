"""Who stopped a run."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_stops"
down_revision = "0.1.0_groups"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("training_runs", sa.Column("stopped_by", sa.String(), nullable=True))
