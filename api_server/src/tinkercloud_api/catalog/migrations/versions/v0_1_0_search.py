"""An index of the words with which runs and sessions are searched, and of lists by their time.

The housekeeping adds the terms of rows that exist.
"""

import sqlalchemy as sa
from alembic import op

revision = "0.1.0_search"
down_revision = "0.1.0_newest"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    term = sa.String().with_variant(sa.String(collation="C"), "postgresql")
    op.create_table(
        "search_terms",
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("term", term, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "term", "id"),
        sqlite_with_rowid=False,
    )
    for table in ("sessions", "training_runs"):
        op.add_column(
            table,
            sa.Column("is_searchable", sa.Boolean(), server_default=sa.false(), nullable=False),
        )
        op.create_index(f"{table}_to_index", table, ["is_searchable"])
    op.create_index("projects_newest", "projects", ["created_at"])
    op.create_index("projects_by_name", "projects", ["name", "id"])
    op.create_index("programs_newest", "programs", ["created_at"])
    op.create_index("uploads_open", "uploads", ["is_finished", "expires_at"])
