"""Clients of sampling sessions, and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0011_rest"
down_revision = "0010_admission"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "sampler_clients",
        sa.Column("sampler_id", sa.String(), nullable=False),
        sa.Column("joined", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("sampler_id"),
    )
    op.create_table(
        "audit_entries",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=True),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("audit_entries_by_owner", "audit_entries", ["owner", "at"], unique=False)
    op.create_index("audit_entries_by_time", "audit_entries", ["at"], unique=False)


def downgrade() -> None:
    """Undo."""
    op.drop_index("audit_entries_by_time", table_name="audit_entries")
    op.drop_index("audit_entries_by_owner", table_name="audit_entries")
    op.drop_table("audit_entries")
    op.drop_table("sampler_clients")
