"""The catalog's tables. Every change here needs a migration (`migrations/versions`).

During a rolling update, replicas of the previous version continue with tables that the first new
replica has migrated. A migration may therefore only add optional columns, and remove only columns
that the previous version does not use.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    String,
    TypeDecorator,
    false,
    select,
    text,
)
from sqlalchemy import DateTime as SqlDateTime
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DontWrapMixin
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column

from tinkercloud_protocol.wire.errors import InvalidRequest


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


class User(Table):
    """What is known of an owner beyond its keys. Most owners have no row."""

    __tablename__ = "users"

    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str | None]
    """What keys of the owner may do at most; None means what each key may."""
    created_at: Mapped[datetime] = mapped_column(default=now)
    disabled_at: Mapped[datetime | None]
    """Since when all keys of the owner are refused; None if they are not."""
    subject: Mapped[str | None] = mapped_column(unique=True)
    """Issuer and subject of the OpenID account that logs in as this owner."""


class Project(Table):
    """A group of sessions that several owners use."""

    __tablename__ = "projects"
    __table_args__ = (
        Index("projects_newest", "created_at"),
        Index("projects_by_name", "name", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=now)
    created_by: Mapped[str]


class ProjectMember(Table):
    """What an owner may do with the objects of a project."""

    __tablename__ = "project_members"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    owner: Mapped[str] = mapped_column(primary_key=True, index=True)
    role: Mapped[str]


class UserGroup(Table):
    """A group that the OpenID account of an owner had at its last login."""

    __tablename__ = "user_groups"

    owner: Mapped[str] = mapped_column(primary_key=True)
    member: Mapped[str] = mapped_column(primary_key=True)
    """The group as a member of projects: `group:` and its name."""
    ends_at: Mapped[datetime]
    """When it stops counting: with the key of that login."""


class AccessVersion(Table):
    """A number that grows with every change of who may access what. It has one row."""

    __tablename__ = "access_versions"

    name: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)


class ServerSecret(Table):
    """A random secret that all servers of one catalog share."""

    __tablename__ = "server_secrets"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=now)


EXPIRED = "expired"
"""Finish reason of sessions that the server ended because their client was inactive."""


STORED = "stored"
"""Generation of runs without a live model, which only hold a copied or imported checkpoint."""


class Session(Table):
    """An SDK session: everything that one `ServiceClient` created."""

    __tablename__ = "sessions"
    __table_args__ = (
        Index("sessions_newest", "created_at", "id"),
        Index("sessions_to_index", "is_searchable"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[datetime] = mapped_column(default=now)
    last_heartbeat_at: Mapped[datetime] = mapped_column(default=now)
    finished_at: Mapped[datetime | None]
    finish_reason: Mapped[str | None]
    finish_detail: Mapped[str | None]
    sdk_version: Mapped[str]
    display_name: Mapped[str | None]
    project_id: Mapped[str | None] = mapped_column(index=True)
    """The project, or the id of one that was deleted."""
    key_id: Mapped[int | None]
    """The API key that created it; None if no request did, or before this was recorded."""
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, str]]
    is_searchable: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Whether it has its terms (`SearchTerm`); False if an earlier version has recorded it."""
    project: Mapped[str | None] = column_property(
        select(Project.id)
        .where(Project.id == project_id)
        .correlate_except(Project)
        .scalar_subquery()
    )
    """The project to which the session belongs; None if it belongs to its owner alone."""


def _project_of_session(session_id: Mapped[str]) -> ColumnElement[str | None]:
    """Return the query for the project of a session, for a row that names the session."""
    found = select(Project.id).join(Session, Session.project_id == Project.id)
    return (
        found.where(Session.id == session_id).correlate_except(Project, Session).scalar_subquery()
    )


class TrainingRun(Table):
    """A training run. Its id is the model id."""

    __tablename__ = "training_runs"
    __table_args__ = (
        Index("training_runs_to_sweep", "is_swept", "deleted_at"),
        Index("training_runs_to_index", "is_searchable"),
        Index("training_runs_open", "deleted_at", "base_model", "generation"),
        # The order of the list of runs; it counts them by the last column.
        Index(
            "training_runs_newest",
            text("(deleted_at IS NOT NULL)"),
            text("last_request_at DESC"),
            "id",
            "generation",
        ),
        Index(
            "training_runs_keeping_samples",
            "keeps_samples_since",
            sqlite_where=text("keeps_samples_since IS NOT NULL"),
            postgresql_where=text("keeps_samples_since IS NOT NULL"),
        ),
    )

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
    admitted_at: Mapped[datetime | None]
    """When the limits of its tenant allowed it to start; None while it waits, and for runs without
    a tenant."""
    deleted_at: Mapped[datetime | None]
    stopped_by: Mapped[str | None]
    """Who stopped it, such as `an administrator`; None if its client or its session ended it."""
    keeps_samples_since: Mapped[datetime | None]
    """Since when the text of some samples is kept (`SampleText`); None if it is not kept."""
    is_swept: Mapped[bool] = mapped_column(default=False)
    """Whether state that the head may have written after the deletion has been removed."""
    is_searchable: Mapped[bool] = mapped_column(default=False, server_default=false())
    """As `Session.is_searchable`."""
    project: Mapped[str | None] = column_property(_project_of_session(session_id))
    """The project of its session, as `Session.project`; not set in rows that were just added."""


class SearchTerm(Table):
    """A text with which the search finds a session or a run (`catalog.runs.search_terms`)."""

    __tablename__ = "search_terms"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 - as `type_annotation_map`

    kind: Mapped[str] = mapped_column(primary_key=True)
    """`session` or `run`."""
    term: Mapped[str] = mapped_column(
        String().with_variant(String(collation="C"), "postgresql"), primary_key=True
    )
    """The text, which is searched from its beginning, so it is in the order of characters."""
    id: Mapped[str] = mapped_column(primary_key=True)
    """Id of the session or run."""


class TenantTurn(Table):
    """A row to lock: one replica at a time admits runs of a tenant."""

    __tablename__ = "tenant_turns"

    tenant: Mapped[str] = mapped_column(primary_key=True)


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
    one. None without such a checkpoint."""
    created_at: Mapped[datetime] = mapped_column(default=now)
    project: Mapped[str | None] = column_property(_project_of_session(session_id))
    """The project of its session, as `Session.project`; not set in rows that were just added."""


class Checkpoint(Table):
    """A pending or existing checkpoint; this table indexes the manifests in the object store."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        Index("checkpoints_by_owner", "owner", "created_at"),
        Index("checkpoints_to_index", "is_indexed"),
        Index("checkpoints_newest", "created_at"),
    )

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
    base_model: Mapped[str | None]
    """None as long as there is no manifest."""
    user_metadata: Mapped[dict[str, str] | None]
    expires_at: Mapped[datetime | None]
    is_public: Mapped[bool] = mapped_column(default=False)
    damage: Mapped[str | None]
    """Why the manifest cannot be read; the other columns are from the previous manifest, if any."""
    project: Mapped[str | None] = column_property(
        select(Project.id)
        .join(Session, Session.project_id == Project.id)
        .join(TrainingRun, TrainingRun.session_id == Session.id)
        .where(TrainingRun.id == run_id)
        .correlate_except(Project, Session, TrainingRun)
        .scalar_subquery()
    )
    """The project of its run, as `Session.project`; not set in rows that were just added."""


class Program(Table):
    """A program that the server runs for an owner."""

    __tablename__ = "programs"
    __table_args__ = (
        Index("programs_by_owner", "owner", "created_at"),
        Index("programs_by_phase", "phase"),
        Index("programs_newest", "created_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str]
    base_model: Mapped[str | None]
    model_id: Mapped[str | None]
    """The model that it was started for."""
    module: Mapped[str | None]
    source: Mapped[str | None]
    args: Mapped[list[str]]
    key_id: Mapped[int | None]
    """Its current API key; None before the first start."""
    phase: Mapped[str]
    restarts: Mapped[int] = mapped_column(default=0)
    exit_code: Mapped[int | None]
    message: Mapped[str | None]
    progress: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """The merged reports, `tinkercloud_protocol.programs.program_messages.ProgramProgress`."""
    created_at: Mapped[datetime] = mapped_column(default=now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    @property
    def project(self) -> str | None:
        """Programs belong to their owner alone."""
        return None


class Upload(Table):
    """A checkpoint that is being uploaded or copied; it does not exist until it is finished."""

    __tablename__ = "uploads"
    __table_args__ = (Index("uploads_open", "is_finished", "expires_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    """The id of the run of a copy, or of the session of an uploaded adapter's run."""
    owner: Mapped[str] = mapped_column(index=True)
    project_id: Mapped[str | None]
    manifest: Mapped[dict[str, Any]]
    """The checkpoint's manifest; without files until they have been received."""
    adapter_config: Mapped[dict[str, Any]]
    """The content of `adapter_config.json`; empty for a copy, and until it has been received."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    """Size of the files, as far as it is known in advance; 0 if it is not known yet."""
    expires_at: Mapped[datetime]
    """When the upload is abandoned, or forgotten if it is finished."""
    is_finished: Mapped[bool] = mapped_column(default=False)

    @property
    def project(self) -> str | None:
        """An upload belongs to its owner alone until it is a checkpoint of its project."""
        return None


class UsageHour(Table):
    """What an owner has used of a head in an hour, for one session and model."""

    __tablename__ = "usage_hours"
    __table_args__ = (Index("usage_hours_by_owner", "owner", "hour"),)

    generation: Mapped[str] = mapped_column(primary_key=True)
    """Generation of the head."""
    hour: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Hours from 1970-01-01 in UTC to the start of the hour."""
    owner: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    """The session that sent the requests, which may have no row."""
    model_id: Mapped[str] = mapped_column(primary_key=True)
    """The trained or sampled model; for a checkpoint, its run. Empty for the base model."""
    base_model: Mapped[str]
    trained_tokens: Mapped[int] = mapped_column(BigInteger)
    forward_tokens: Mapped[int] = mapped_column(BigInteger)
    prefill_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    sampled_tokens: Mapped[int] = mapped_column(BigInteger)
    engine_seconds: Mapped[float] = mapped_column(Double)


class RunPoint(Table):
    """Some successive optimizer steps of a run, as `thinned_curves.CurvePoint`."""

    __tablename__ = "run_points"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    stride: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Steps of a full point. Only the points of a run's largest stride count."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its number among the points of the curve, from 0."""
    steps: Mapped[int] = mapped_column(BigInteger)
    step: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime]
    metrics: Mapped[dict[str, Any]]


class LoggedValue(Table):
    """A value that the client of a run has logged at a step."""

    __tablename__ = "logged_values"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    value: Mapped[float] = mapped_column(Double)
    at: Mapped[datetime]


class SampleText(Table):
    """The text of a sample of a run, as `kept_samples.KeptSample`."""

    __tablename__ = "sample_texts"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    place: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    prompt: Mapped[str]
    prompt_tokens_left_out: Mapped[int] = mapped_column(BigInteger)
    answer: Mapped[str]
    answer_tokens_left_out: Mapped[int] = mapped_column(BigInteger)


class ConsoleToken(Table):
    """A link to the console that was not used, or the session of a browser."""

    __tablename__ = "console_tokens"

    token_hash: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 of the token, hex."""
    is_link: Mapped[bool]
    key_id: Mapped[int] = mapped_column(index=True)
    """The API key whose rights it has."""
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)
    session_ends_at: Mapped[datetime | None]
    """When a session that a link opens has to end: with the token that asked for the link."""


class SamplerClientCount(Table):
    """How many clients have joined a sampling session."""

    __tablename__ = "sampler_clients"

    sampler_id: Mapped[str] = mapped_column(primary_key=True)
    joined: Mapped[int]


class AuditEntry(Table):
    """A request that changed something, or tried to; or its outcome. Rows are only added."""

    __tablename__ = "audit_log"
    __table_args__ = (
        Index("audit_log_by_owner", "owner", "at"),
        Index("audit_log_by_time", "at"),
        Index("audit_log_by_event", "event"),
    )

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """Its number: one more than that of the row before."""
    at: Mapped[datetime]
    owner: Mapped[str]
    """Owner of the key that sent the request."""
    key_id: Mapped[int | None]
    """The key; None for a command on the server, and for a logout."""
    event: Mapped[str]
    """What the request asked for, such as `model_create` or `checkpoint_delete`."""
    details: Mapped[dict[str, Any]]
    outcome_of: Mapped[int | None] = mapped_column(BigInteger, index=True)
    """The row of the request, if this is its outcome."""
    hash: Mapped[str]
    """As `audit_chain.link`."""


class AuditChain(Table):
    """The end of the audit log, in one row, which every writer locks."""

    __tablename__ = "audit_chain"

    name: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)
    """Number of the newest entry; 0 if there was none."""
    hash: Mapped[str]
    """Its hash; empty if there was none."""


class StoredDay(Table):
    """What an owner's checkpoints of a base model, in a project, occupied on a day."""

    __tablename__ = "stored_days"

    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Days from 1970-01-01 in UTC."""
    owner: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(primary_key=True)
    """Empty for none."""
    base_model: Mapped[str] = mapped_column(primary_key=True)
    """Empty if it is not known."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
