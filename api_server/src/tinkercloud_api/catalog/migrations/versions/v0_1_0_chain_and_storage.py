"""The audit log as a chain of rows, and the storage of checkpoints by day.

Entries that the log has already become the first rows of the chain. The table of before stays,
because servers of the version before may still run during an upgrade; what they record then is not
in the chain.
"""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

from tinkercloud_api.catalog.access.audit_chain import link

revision = "0.1.0_chain_and_storage"
down_revision = "0.1.0"
branch_labels = None
depends_on = None

_BATCH = 1000


def upgrade() -> None:
    """Apply."""
    _chain_audit_entries()
    key = ("day", "owner", "project_id", "base_model")
    op.create_table(
        "stored_days",
        sa.Column("day", sa.Integer(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.String(), nullable=False) for name in key[1:]),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*key),
    )


def _chain_audit_entries() -> None:
    entries = op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=True),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("outcome_of", sa.BigInteger(), nullable=True),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="audit_log_key"),
    )
    chain = op.create_table(
        "audit_chain",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    number, newest = _copy(entries)
    op.bulk_insert(chain, [{"name": "audit", "number": number, "hash": newest}])
    op.create_index("audit_log_by_owner", "audit_log", ["owner", "at"])
    op.create_index("audit_log_by_time", "audit_log", ["at"])
    op.create_index("audit_log_by_event", "audit_log", ["event"])
    op.create_index("ix_audit_log_outcome_of", "audit_log", ["outcome_of"])


def _copy(entries: sa.Table) -> tuple[int, str]:
    """Chain the entries of before; return the number of the last one, and its hash."""
    old = sa.table(
        "audit_entries",
        sa.column("id", sa.Integer),
        sa.column("at", sa.DateTime(timezone=True)),
        *(sa.column(name) for name in ("owner", "key_id", "event")),
        sa.column("details", sa.JSON),
    )
    number, newest, last = 0, "", -1
    while True:
        query = sa.select(old).where(old.c.id > last).order_by(old.c.id).limit(_BATCH)
        rows = op.get_bind().execute(query).mappings().all()
        if not rows:
            return number, newest
        chained: list[dict[str, Any]] = []
        for row in rows:
            number, last = number + 1, row["id"]
            moment: datetime = row["at"]
            at = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            columns = {**row, "outcome_of": None}
            newest = link(newest, number, at, columns)
            chained.append({**columns, "id": number, "at": at, "hash": newest})
        op.bulk_insert(entries, chained)
