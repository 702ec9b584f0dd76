"""Users, projects with members, and the version of access rights.

Earlier releases recorded any text as the project of a session. A text that one owner used becomes a
project of that owner. One that several owners used stays a label without effect: as a project, it
would show them each other's runs.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012_projects"
down_revision = "0011_rest"
branch_labels = None
depends_on = None

_OF_ONE_OWNER = (
    "FROM sessions WHERE project_id IS NOT NULL GROUP BY project_id HAVING MIN(owner) = MAX(owner)"
)


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "users",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("subject", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
        sa.UniqueConstraint("subject"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "project_members",
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
        sa.PrimaryKeyConstraint("project_id", "owner"),
    )
    op.create_index("ix_project_members_owner", "project_members", ["owner"], unique=False)
    op.create_table(
        "access_versions",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.execute("INSERT INTO access_versions (name, number) VALUES ('access', 1)")
    op.execute(
        "INSERT INTO projects (id, name, created_at, created_by)"
        f" SELECT project_id, project_id, MIN(created_at), MIN(owner) {_OF_ONE_OWNER}"
    )
    op.execute(
        "INSERT INTO project_members (project_id, owner, role)"
        " SELECT id, created_by, 'admin' FROM projects"
    )
    op.create_index("ix_sessions_project_id", "sessions", ["project_id"], unique=False)


def downgrade() -> None:
    """Undo."""
    op.drop_index("ix_sessions_project_id", table_name="sessions")
    op.drop_table("access_versions")
    op.drop_index("ix_project_members_owner", table_name="project_members")
    op.drop_table("project_members")
    op.drop_table("projects")
    op.drop_table("users")
