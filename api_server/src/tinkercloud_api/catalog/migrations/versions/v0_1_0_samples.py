"""The text of samples, of the runs whose owners keep some."""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_samples"
down_revision = "0.1.0_stops"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column(
        "training_runs",
        sa.Column("keeps_samples_since", sa.DateTime(timezone=True), nullable=True),
    )
    op.create_index(
        "training_runs_keeping_samples",
        "training_runs",
        ["keeps_samples_since"],
        sqlite_where=sa.text("keeps_samples_since IS NOT NULL"),
        postgresql_where=sa.text("keeps_samples_since IS NOT NULL"),
    )
    op.create_table(
        "sample_texts",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("place", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("prompt", sa.String(), nullable=False),
        sa.Column("prompt_tokens_left_out", sa.BigInteger(), nullable=False),
        sa.Column("answer", sa.String(), nullable=False),
        sa.Column("answer_tokens_left_out", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", "place"),
    )
