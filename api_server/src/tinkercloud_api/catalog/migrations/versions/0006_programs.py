"""Programs that the server runs for owners."""

import sqlalchemy as sa
from alembic import op

revision = "0006_programs"
down_revision = "0005_damage"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "programs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=True),
        sa.Column("model_id", sa.String(), nullable=True),
        sa.Column("module", sa.String(), nullable=True),
        sa.Column("source", sa.String(), nullable=True),
        sa.Column("args", sa.JSON(), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=True),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("message", sa.String(), nullable=True),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("programs_by_owner", "programs", ["owner", "created_at"], unique=False)
    op.create_index("programs_by_phase", "programs", ["phase"], unique=False)


def downgrade() -> None:
    """Undo."""
    op.drop_index("programs_by_phase", table_name="programs")
    op.drop_index("programs_by_owner", table_name="programs")
    op.drop_table("programs")
