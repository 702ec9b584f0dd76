"""The catalog's tables. Every change here needs a migration (`migrations/versions`).

While replicas are replaced, those of the last version go on with tables that the first of the next
has migrated: a migration adds what they can leave out, and takes away only what they have not used.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, String, TypeDecorator
from sqlalchemy import DateTime as SqlDateTime
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DontWrapMixin
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tinkercloud_protocol.errors import InvalidRequest


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time with its zone, also on SQLite, which knows none."""

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
    """A text holds U+0000, which PostgreSQL has no room for."""


class Text(TypeDecorator[str]):
    """A text that every database can hold: what one of them refuses is refused with all."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Check a text that is stored or looked for.

        Raises:
            UnstorableText: it holds U+0000.
        """
        del dialect
        if value is not None and "\0" in value:
            raise UnstorableText(f"{value[:80]!r} holds the character U+0000: send it without")
        return value


def now() -> datetime:
    """Return the current time, with its zone."""
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
    """None means never."""
    last_used_at: Mapped[datetime | None]
    """To within a minute; None if it was never used."""
    is_bootstrap: Mapped[bool] = mapped_column(default=False)
    """Whether it came from the setting `bootstrap_key`."""

    def is_valid(self, moment: datetime) -> bool:
        """Whether requests with it are accepted at a moment."""
        is_expired = self.expires_at is not None and self.expires_at <= moment
        return self.revoked_at is None and not is_expired


EXPIRED = "expired"
"""Reason of a session's end that no client gave: there was no sign of one for long."""


class Session(Table):
    """What one `ServiceClient` created."""

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
    """A model that was asked for. Its id is the model id."""

    __tablename__ = "training_runs"
    __table_args__ = (Index("training_runs_to_sweep", "is_swept", "deleted_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    spec: Mapped[dict[str, Any]]
    """`launch.ModelSpec`, as the head was told."""
    user_metadata: Mapped[dict[str, str] | None]
    created_at: Mapped[datetime] = mapped_column(default=now)
    last_request_at: Mapped[datetime] = mapped_column(default=now)
    generation: Mapped[str | None]
    """Generation of the head that holds the model; None until it has been created there."""
    deleted_at: Mapped[datetime | None]
    is_swept: Mapped[bool] = mapped_column(default=False)
    """Whether what its head may have written after the deletion has been removed."""


class SamplingSession(Table):
    """What one `SamplingClient` samples from."""

    __tablename__ = "sampling_sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str]
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    run_id: Mapped[str | None]
    """The run whose weights it holds, if they were never saved under a name."""
    saved_at: Mapped[datetime | None]
    """When the checkpoint at `model_path` was saved; one saved there later is another. None also in
    rows from before this was noted."""
    created_at: Mapped[datetime] = mapped_column(default=now)


class Checkpoint(Table):
    """A checkpoint that was asked for; an index of the manifests in the object store."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index("checkpoints_by_owner", "owner", "created_at"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    asked_at: Mapped[datetime] = mapped_column(default=now)
    """When it was last asked for."""
    is_indexed: Mapped[bool] = mapped_column(default=False)
    """Whether what follows is of the manifest that was last asked for."""
    created_at: Mapped[datetime | None]
    """Of the manifest; None while there is none, and then the checkpoint does not exist."""
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    user_metadata: Mapped[dict[str, str] | None]
    expires_at: Mapped[datetime | None]
    is_public: Mapped[bool] = mapped_column(default=False)
    damage: Mapped[str | None]
    """Why the manifest can't be read; what follows from it is that of the one before, if any."""
