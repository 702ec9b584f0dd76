"""The tables of release 0.1.0.

The id of a migration begins with the release that introduces it, as in `0.2.0` or `0.2.0_quotas`:
an earlier release names it when it refuses the catalog.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0.1.0"
down_revision = None
branch_labels = None
depends_on = None

Column = sa.Column[Any]


def upgrade() -> None:
    """Apply."""
    _create_access_tables()
    _create_sessions()
    _create_runs()
    _create_checkpoints()
    _create_programs()
    _create_usage_hours()
    _create_audit_entries()


def _text(name: str, *, nullable: bool = False) -> Column:
    return sa.Column(name, sa.String(), nullable=nullable)


def _moment(name: str, *, nullable: bool = False) -> Column:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _flag(name: str) -> Column:
    return sa.Column(name, sa.Boolean(), nullable=False)


def _json(name: str, *, nullable: bool = False) -> Column:
    return sa.Column(name, sa.JSON(), nullable=nullable)


def _integer(name: str, *, nullable: bool = False) -> Column:
    return sa.Column(name, sa.Integer(), nullable=nullable)


def _create_access_tables() -> None:
    op.create_table(
        "api_keys",
        _integer("id"),
        _text("key_hash"),
        _text("name"),
        _text("owner"),
        _text("role"),
        _moment("created_at"),
        _moment("revoked_at", nullable=True),
        _moment("expires_at", nullable=True),
        _moment("last_used_at", nullable=True),
        _flag("is_bootstrap"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("key_hash"),
    )
    op.create_index("ix_api_keys_owner", "api_keys", ["owner"])
    op.create_table(
        "users",
        _text("name"),
        _text("role", nullable=True),
        _moment("created_at"),
        _moment("disabled_at", nullable=True),
        _text("subject", nullable=True),
        sa.PrimaryKeyConstraint("name"),
        sa.UniqueConstraint("subject"),
    )
    op.create_table(
        "projects",
        _text("id"),
        _text("name"),
        _moment("created_at"),
        _text("created_by"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "project_members",
        _text("project_id"),
        _text("owner"),
        _text("role"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
        sa.PrimaryKeyConstraint("project_id", "owner"),
    )
    op.create_index("ix_project_members_owner", "project_members", ["owner"])
    versions = op.create_table(
        "access_versions",
        _text("name"),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.bulk_insert(versions, [{"name": "access", "number": 1}])
    op.create_table(
        "server_secrets",
        _text("name"),
        _text("value"),
        _moment("created_at"),
        sa.PrimaryKeyConstraint("name"),
    )


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        _text("id"),
        _text("owner"),
        _moment("created_at"),
        _moment("last_heartbeat_at"),
        _moment("finished_at", nullable=True),
        _text("finish_reason", nullable=True),
        _text("finish_detail", nullable=True),
        _text("sdk_version"),
        _text("display_name", nullable=True),
        _text("project_id", nullable=True),
        _json("tags"),
        _json("user_metadata"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_sessions_owner", "sessions", ["owner"])
    op.create_index("ix_sessions_project_id", "sessions", ["project_id"])
    op.create_table(
        "sampling_sessions",
        _text("id"),
        _text("session_id"),
        _text("owner"),
        _text("base_model"),
        _text("model_path", nullable=True),
        _text("run_id", nullable=True),
        _moment("saved_at", nullable=True),
        _moment("created_at"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_sampling_sessions_session_id", "sampling_sessions", ["session_id"])
    op.create_table(
        "sampler_clients",
        _text("sampler_id"),
        _integer("joined"),
        sa.PrimaryKeyConstraint("sampler_id"),
    )


def _create_runs() -> None:
    op.create_table(
        "training_runs",
        _text("id"),
        _text("session_id"),
        _text("owner"),
        _text("base_model"),
        _json("spec"),
        _json("user_metadata", nullable=True),
        _moment("created_at"),
        _moment("last_request_at"),
        _text("generation", nullable=True),
        _moment("admitted_at", nullable=True),
        _moment("deleted_at", nullable=True),
        _flag("is_swept"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_training_runs_owner", "training_runs", ["owner"])
    op.create_index("ix_training_runs_session_id", "training_runs", ["session_id"])
    op.create_index("training_runs_to_sweep", "training_runs", ["is_swept", "deleted_at"])
    op.create_table("tenant_turns", _text("tenant"), sa.PrimaryKeyConstraint("tenant"))


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        _text("run_id"),
        _text("kind"),
        _text("name"),
        _text("owner"),
        _moment("asked_at"),
        _flag("is_indexed"),
        _moment("created_at", nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        _text("base_model", nullable=True),
        _json("user_metadata", nullable=True),
        _moment("expires_at", nullable=True),
        _flag("is_public"),
        _text("damage", nullable=True),
        sa.PrimaryKeyConstraint("run_id", "kind", "name"),
    )
    op.create_index("checkpoints_by_owner", "checkpoints", ["owner", "created_at"])
    op.create_table(
        "uploads",
        _text("id"),
        _text("owner"),
        _text("project_id", nullable=True),
        _json("manifest"),
        _json("adapter_config"),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        _moment("expires_at"),
        _flag("is_finished"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_uploads_owner", "uploads", ["owner"])


def _create_programs() -> None:
    op.create_table(
        "programs",
        _text("id"),
        _text("owner"),
        _text("name"),
        _text("base_model", nullable=True),
        _text("model_id", nullable=True),
        _text("module", nullable=True),
        _text("source", nullable=True),
        _json("args"),
        _integer("key_id", nullable=True),
        _text("phase"),
        _integer("restarts"),
        _integer("exit_code", nullable=True),
        _text("message", nullable=True),
        _json("progress"),
        _moment("created_at"),
        _moment("started_at", nullable=True),
        _moment("finished_at", nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("programs_by_owner", "programs", ["owner", "created_at"])
    op.create_index("programs_by_phase", "programs", ["phase"])


def _create_usage_hours() -> None:
    tokens = ("trained", "forward", "prefill", "cached", "sampled")
    op.create_table(
        "usage_hours",
        _text("generation"),
        sa.Column("hour", sa.Integer(), autoincrement=False, nullable=False),
        _text("owner"),
        _text("session_id"),
        _text("model_id"),
        _text("base_model"),
        *[sa.Column(f"{name}_tokens", sa.BigInteger(), nullable=False) for name in tokens],
        sa.Column("engine_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("generation", "hour", "owner", "session_id", "model_id"),
    )
    op.create_index("usage_hours_by_owner", "usage_hours", ["owner", "hour"])


def _create_audit_entries() -> None:
    op.create_table(
        "audit_entries",
        _integer("id"),
        _moment("at"),
        _text("owner"),
        _integer("key_id", nullable=True),
        _text("event"),
        _json("details"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("audit_entries_by_owner", "audit_entries", ["owner", "at"])
    op.create_index("audit_entries_by_time", "audit_entries", ["at"])
