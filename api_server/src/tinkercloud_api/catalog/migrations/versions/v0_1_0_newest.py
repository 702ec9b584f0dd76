"""Indexes for the newest sessions and checkpoints, so that pages with them read no table whole."""

from alembic import op

revision = "0.1.0_newest"
down_revision = "0.1.0_session_keys"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index("sessions_newest", "sessions", ["created_at", "id"])
    op.create_index("checkpoints_newest", "checkpoints", ["created_at"])
