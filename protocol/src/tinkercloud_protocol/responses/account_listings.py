"""Responses about what an owner did and used: traces, tokens, the audit log, billing.

Field names are the SDK's (`tinker.types`), as in `listings`.
"""

from datetime import datetime
from typing import Any, Literal

from tinkercloud_protocol.responses.listings import Answer


class TraceExport(Answer):
    """Where the trace of a session can be downloaded."""

    status: Literal["ready"] = "ready"
    url: str


class TokenAnswer(Answer):
    """An access token."""

    jwt: str


class ConsoleLink(Answer):
    """POST auth/console."""

    path: str
    """Path and query of the link, which works once, within ten minutes."""


class AuditEvent(Answer):
    """A request that changed something."""

    timestamp: datetime
    event: str
    """What it asked for, `<resource>_<action>`."""
    event_details: dict[str, Any]
    """Owner and key of the caller, method, path, address, status of the response, and number and
    hash of the entry."""


class AuditAnswer(Answer):
    """The audit log of a day."""

    entries: list[AuditEvent]


class BillingEvent(Answer):
    """Tokens of one kind that a session has used of a base model in an hour."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None
    user_id: str
    user_name: str
    session_id: str | None
    project_id: str | None
    event_info: dict[str, Any]
    """`type` (training, sampling_prefill, sampling_sample), `token_count`, and `cached` of prompts
    (`tinker.types.BillingEventInfo`)."""


class BillingSession(Answer):
    """A session in a list of events."""

    user_metadata: dict[str, str] | None


class BillingUsage(Answer):
    """The tokens of a window."""

    data: list[BillingEvent]
    sessions: dict[str, BillingSession]


class CheckpointStorage(Answer):
    """What the checkpoints of an owner's project occupy now."""

    project_id: str | None
    org_user_urn: str
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    """In units of 10^9 bytes."""


class CheckpointStorageList(Answer):
    """The checkpoint storage of owners."""

    data: list[CheckpointStorage]
