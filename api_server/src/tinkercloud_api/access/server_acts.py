"""What a server itself changes about rights when it starts, for the audit log."""

import json
from typing import Any

import structlog

from tinkercloud_api.access.auth import hash_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.access.audit_log import SERVER, AuditLog
from tinkercloud_api.catalog.schema.tables import ApiKey, AuditEntry, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config.settings import KEY_PREFIX, Settings

log = structlog.get_logger(__name__)

_VALUE = "value"


async def begin_key(audit_log: AuditLog, what: str) -> AuditEntry:
    """Record that the server is about to register a key.

    Raises:
        Unavailable: the database does not respond; the key must not be registered.
    """
    details = {"method": "SERVER", "path": what, "status": "no response yet"}
    return await audit_log.begin(SERVER, None, "key_create", details)


async def finish_key(
    audit_log: AuditLog, entry: AuditEntry, key: ApiKey, replaced: list[int] | None = None
) -> None:
    """Record the key, and the ids of keys that were revoked for it.

    Raises:
        Unavailable: the database does not respond.
    """
    objects = [f"key {key_id}" for key_id in (key.id, *(replaced or []))]
    status = "done" if key.is_valid(now()) else "refused"
    await audit_log.finish(entry, {"status": status, "objects": objects, "role": key.role})


async def record_settings(audit_log: AuditLog, settings: Settings) -> None:
    """Record settings that give or limit rights, if the last server had others.

    Raises:
        Unavailable: the database does not respond.
    """
    tenants = {name: each.model_dump(mode="json") for name, each in settings.tenants.items()}
    login = settings.oidc.model_dump(mode="json") if settings.oidc is not None else {}
    storage = settings.model_dump(include={"max_checkpoint_bytes_per_owner"}, exclude_none=True)
    changes: dict[str, tuple[str, str, dict[str, Any]]] = {
        "quota_set": ("setting tenants", "tenant", tenants),
        "storage_quota_set": ("setting max_checkpoint_bytes_per_owner", "setting", storage),
        "login_set": ("setting oidc", "setting", login),
    }
    for event, (path, kind, value) in changes.items():
        last = await audit_log.latest(event)
        known = last.details[_VALUE] if last is not None else {}
        # As a database returns it.
        stored = json.loads(json.dumps(value))
        if known != stored:
            changed = sorted(n for n in {*known, *stored} if known.get(n) != stored.get(n))
            details = {"method": "SERVER", "path": path, "status": "done", _VALUE: value}
            details["objects"] = [f"{kind} {name}" for name in changed]
            await audit_log.begin(SERVER, None, event, details)


async def register_bootstrap_key(catalog: Catalog, audit_log: AuditLog, settings: Settings) -> None:
    """Register the configured bootstrap key, if any, and revoke the one that it replaces."""
    if settings.bootstrap_key is None:
        return
    key = settings.bootstrap_key.get_secret_value()
    if not key.startswith(KEY_PREFIX):
        log.warning(
            "the Tinker SDK rejects the configured bootstrap key before it sends a request; other"
            " clients can use it",
            accepted_by_the_sdk=f"keys that start with {KEY_PREFIX!r}",
        )
    known = await catalog.key(hash_key(key))
    entry = None
    if known is None or not known.is_bootstrap:
        entry = await begin_key(audit_log, "setting bootstrap_key")
    row, replaced = await catalog.add_bootstrap_key(
        key_hash=hash_key(key),
        name="bootstrap",
        owner="bootstrap",
        role=Role.ADMIN,
    )
    if entry is not None:
        await finish_key(audit_log, entry, row, list(replaced))
    if not row.is_valid(now()):
        log.warning(
            "the configured bootstrap key was revoked or has expired and stays rejected; configure"
            " a new one",
            key_id=row.id,
        )
    for key_id in replaced:
        log.warning(
            "the configured bootstrap key replaces an earlier one, which was revoked",
            revoked_key_id=key_id,
        )
