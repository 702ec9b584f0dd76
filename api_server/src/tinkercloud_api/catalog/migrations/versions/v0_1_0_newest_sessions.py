"""An index for the list of sessions, so that its page reads no table whole."""

from alembic import op

revision = "0.1.0_newest_sessions"
down_revision = "0.1.0_session_keys"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index("sessions_newest", "sessions", ["created_at", "id"])
