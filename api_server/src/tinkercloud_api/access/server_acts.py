"""What a server itself changes about rights when it starts, for the audit log."""

import json
from typing import Any

from tinkercloud_api.catalog.access.audit_log import SERVER, AuditLog
from tinkercloud_api.catalog.schema.tables import ApiKey, AuditEntry, now
from tinkercloud_api.config.settings import Settings

_VALUE = "value"


async def begin_key(log: AuditLog, what: str) -> AuditEntry:
    """Record that the server is about to register a key.

    Raises:
        Unavailable: the database does not respond; the key must not be registered.
    """
    details = {"method": "SERVER", "path": what, "status": "no response yet"}
    return await log.begin(SERVER, None, "key_create", details)


async def finish_key(
    log: AuditLog, entry: AuditEntry, key: ApiKey, replaced: list[int] | None = None
) -> None:
    """Record the key, and the ids of keys that were revoked for it.

    Raises:
        Unavailable: the database does not respond.
    """
    objects = [f"key {key_id}" for key_id in (key.id, *(replaced or []))]
    status = "done" if key.is_valid(now()) else "refused"
    await log.finish(entry, {"status": status, "objects": objects, "role": key.role})


async def record_settings(log: AuditLog, settings: Settings) -> None:
    """Record settings that give or limit rights, if the last server had others.

    Raises:
        Unavailable: the database does not respond.
    """
    tenants = {name: each.model_dump(mode="json") for name, each in settings.tenants.items()}
    login = settings.oidc.model_dump(mode="json") if settings.oidc is not None else {}
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "quota_set": ("setting tenants", tenants),
        "login_set": ("setting oidc", login),
    }
    for event, (path, value) in changes.items():
        last = await log.latest(event)
        known = last.details[_VALUE] if last is not None else {}
        # As a database returns it.
        if known != json.loads(json.dumps(value)):
            details = {"method": "SERVER", "path": path, "status": "done", _VALUE: value}
            await log.begin(SERVER, None, event, details)
