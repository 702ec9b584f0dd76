"""Indexes for lists of runs, so that no page reads a table whole."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_indexes"
down_revision = "0.1.0_console"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index(
        "training_runs_open", "training_runs", ["deleted_at", "base_model", "generation"]
    )
    op.create_index(
        "training_runs_newest",
        "training_runs",
        [sa.text("(deleted_at IS NOT NULL)"), sa.text("last_request_at DESC"), "id", "generation"],
    )
    op.create_index("checkpoints_to_index", "checkpoints", ["is_indexed"])
