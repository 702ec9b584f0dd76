"""Which key created a session."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_session_keys"
down_revision = "0.1.0_samples"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("sessions", sa.Column("key_id", sa.Integer(), nullable=True))
