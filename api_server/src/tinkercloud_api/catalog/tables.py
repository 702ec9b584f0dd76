"""The catalog's tables. Every change here needs a migration (`migrations/versions`).

During a rolling update, replicas of the previous version continue with tables that the first new
replica has migrated. A migration may therefore only add optional columns, and remove only columns
that the previous version does not use.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, String, TypeDecorator, select
from sqlalchemy import DateTime as SqlDateTime
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DontWrapMixin
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column

from tinkercloud_protocol.errors import InvalidRequest


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time with its time zone, even on SQLite, which has no time zones."""

    impl = SqlDateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Store as UTC."""
        del dialect
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Read back as UTC."""
        del dialect
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class UnstorableText(InvalidRequest, DontWrapMixin):
    """A text contains U+0000, which PostgreSQL cannot store."""


class Text(TypeDecorator[str]):
    """Text that every supported database can store, checked in the same way on all of them."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Check a text that is stored or queried.

        Raises:
            UnstorableText: the text contains U+0000.
        """
        del dialect
        if value is not None and "\0" in value:
            raise UnstorableText(f"{value[:80]!r} contains the character U+0000; remove it")
        return value


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class Table(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a class attribute
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        dict[str, str]: JSON,
        list[str]: JSON,
        str: Text,
    }


class ApiKey(Table):
    """An API key. The key itself is never stored."""

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(primary_key=True)
    key_hash: Mapped[str] = mapped_column(unique=True)
    """SHA-256 of the key, hex. Keys are 256 random bits, so a slow hash would add nothing."""
    name: Mapped[str]
    owner: Mapped[str] = mapped_column(index=True)
    role: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=now)
    revoked_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    """When the key expires; None means never."""
    last_used_at: Mapped[datetime | None]
    """Time of the last use, to within a minute; None if the key was never used."""
    is_bootstrap: Mapped[bool] = mapped_column(default=False)
    """Whether the key comes from the setting `bootstrap_key`."""

    def is_valid(self, moment: datetime) -> bool:
        """Whether the key is accepted at a given time."""
        is_expired = self.expires_at is not None and self.expires_at <= moment
        return self.revoked_at is None and not is_expired


EXPIRED = "expired"
"""Finish reason of sessions that the server ended because their client was inactive."""


class Session(Table):
    """An SDK session: everything that one `ServiceClient` created."""

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[datetime] = mapped_column(default=now)
    last_heartbeat_at: Mapped[datetime] = mapped_column(default=now)
    finished_at: Mapped[datetime | None]
    finish_reason: Mapped[str | None]
    finish_detail: Mapped[str | None]
    sdk_version: Mapped[str]
    display_name: Mapped[str | None]
    project_id: Mapped[str | None]
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, str]]


class TrainingRun(Table):
    """A training run. Its id is the model id."""

    __tablename__ = "training_runs"
    __table_args__ = (Index("training_runs_to_sweep", "is_swept", "deleted_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    spec: Mapped[dict[str, Any]]
    """The `launch.ModelSpec` that was sent to the head."""
    user_metadata: Mapped[dict[str, str] | None]
    created_at: Mapped[datetime] = mapped_column(default=now)
    last_request_at: Mapped[datetime] = mapped_column(default=now)
    generation: Mapped[str | None]
    """Generation of the head that holds the model; None until the model has been created."""
    deleted_at: Mapped[datetime | None]
    is_swept: Mapped[bool] = mapped_column(default=False)
    """Whether state that the head may have written after the deletion has been removed."""


class SamplingSession(Table):
    """A sampling session: the weights that one `SamplingClient` samples from."""

    __tablename__ = "sampling_sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str]
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    run_id: Mapped[str | None]
    """The run whose weights it uses, if they were not saved under a name."""
    saved_at: Mapped[datetime | None]
    """When the checkpoint at `model_path` was saved; a checkpoint saved there later is a different
    one. None also in rows of earlier releases, which did not record it."""
    created_at: Mapped[datetime] = mapped_column(default=now)


class Checkpoint(Table):
    """A pending or existing checkpoint; this table indexes the manifests in the object store."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index("checkpoints_by_owner", "owner", "created_at"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    asked_at: Mapped[datetime] = mapped_column(default=now)
    """When a client last requested to save it."""
    is_indexed: Mapped[bool] = mapped_column(default=False)
    """Whether the following columns match the last requested save; False while it is pending."""
    created_at: Mapped[datetime | None]
    """Creation time in the manifest; None as long as there is no manifest and no checkpoint."""
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    user_metadata: Mapped[dict[str, str] | None]
    expires_at: Mapped[datetime | None]
    is_public: Mapped[bool] = mapped_column(default=False)
    damage: Mapped[str | None]
    """Why the manifest cannot be read; the other columns are from the previous manifest, if any."""
    base_model: Mapped[str | None] = column_property(
        select(TrainingRun.base_model)
        .where(TrainingRun.id == run_id)
        .correlate_except(TrainingRun)
        .scalar_subquery()
    )
    """Base model of its run, of rows that queries return; not stored in this table."""
