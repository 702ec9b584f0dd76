"""The groups of OpenID accounts, which can be members of projects."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_groups"
down_revision = "0.1.0_indexes"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "user_groups",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("member", sa.String(), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner", "member"),
    )
