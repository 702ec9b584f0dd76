"""Writes the audit log while requests are served.

An entry is written before its request runs, so that no change can happen without one; if it can't
be written, the request is refused. If only the outcome can't be written, the client gets its
response, and the entry keeps the status "no response yet". Bodies are not recorded: they may
contain secrets, and the API server does not read those of training requests.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Any

import structlog
from starlette.types import Scope

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import Effect
from tinkercloud_api.catalog.access.audit_log import AuditLog
from tinkercloud_api.catalog.access.project_rows import GROUP
from tinkercloud_api.catalog.schema.tables import ApiKey, AuditEntry
from tinkercloud_protocol.wire.asgi import Message, Send
from tinkercloud_protocol.wire.errors import Unavailable, WireError

log = structlog.get_logger(__name__)

_MAX_PATH = 1024
_PENDING = "no response yet"


@dataclass(frozen=True, slots=True)
class Auditing:
    """Records the requests that change something."""

    entries: AuditLog
    days: int
    """How long entries are kept."""

    async def recorded(
        self, effect: Effect, principal: Principal, scope: Scope, send: Send
    ) -> Send:
        """Record a request before it runs, if the audit log keeps those of its effect.

        Args:
            effect: what it does.
            principal: the caller, who knows the objects that the request used.
            scope: the request.
            send: receives its response (ASGI).

        Returns:
            What receives the response instead, and records its status.

        Raises:
            Unavailable: the entry could not be written; the request must not run.
        """
        method, path, event = scope["method"], scope["path"], effect.event
        if event is None:
            return send
        details: dict[str, Any] = {
            "method": method,
            "path": path[:_MAX_PATH].replace("\0", ""),
            "key_name": principal.key_name,
            "role": str(principal.role),
            "address": (scope.get("client") or ("",))[0],
            "status": _PENDING,
        }
        # A signed URL stands for no key.
        key_id = principal.key_id or None
        try:
            entry = await self.entries.begin(principal.owner, key_id, event, details)
        except Unavailable as error:
            raise Unavailable(
                "the audit log can't be written, because the catalog does not respond; nothing was"
                " done, send the request again"
            ) from error

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome: dict[str, Any] = {"status": message["status"]}
                if principal.seen_projects:
                    outcome["project_ids"] = sorted(principal.seen_projects)
                if principal.named_objects:
                    outcome["objects"] = sorted(principal.named_objects)
                await self._finish(entry, outcome)
            await send(message)

        return send_recorded

    async def record_login(
        self, key: ApiKey, ended: Iterable[ApiKey], groups: Iterable[str], address: str
    ) -> None:
        """Record that a login has issued a key.

        Args:
            key: the key.
            ended: earlier keys that it has ended.
            groups: the groups of its owner from now on, which can be members of projects.
            address: address of the client.

        Raises:
            Unavailable: the entry could not be written.
        """
        objects = [f"key {each.id}" for each in (key, *ended)]
        objects += [GROUP + name for name in sorted(groups)]
        details = {"key_name": key.name, "role": key.role, "objects": objects}
        details |= _at_callback(address)
        await self.entries.begin(key.owner, key.id, "key_login", details)

    async def record_console_login(self, caller: Principal, scope: Scope, status: int) -> None:
        """Record that a browser is about to be logged in with a key.

        Args:
            caller: the key's owner.
            scope: the request.
            status: of the response that opens the console.

        Raises:
            Unavailable: the entry could not be written.
        """
        details = {
            "method": scope["method"],
            "path": scope["path"],
            "key_name": caller.key_name,
            "role": str(caller.role),
            "address": (scope.get("client") or ("",))[0],
            "status": status,
        }
        await self.entries.begin(caller.owner, caller.key_id or None, "console_login", details)

    async def record_logout(self, owner: str, address: str) -> None:
        """Record that an account ends the keys of its logins, before they end.

        Raises:
            Unavailable: the entry could not be written.
        """
        await self.entries.begin(owner, None, "key_logout", _at_callback(address))

    async def forget(self, moment: datetime) -> None:
        """Remove entries that are too old, or too many of their owner."""
        # Once a day, because each removal is an entry of its own.
        day = (moment - timedelta(days=self.days)).date()
        await self.entries.forget(datetime.combine(day, time(), UTC))
        await self.entries.forget_surplus()

    async def _finish(self, entry: AuditEntry, outcome: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(5):
                await self.entries.finish(entry, outcome)
        except (WireError, TimeoutError) as error:
            log.warning(
                "the outcome of a request was not recorded", entry=entry.id, error=str(error)
            )


def _at_callback(address: str) -> dict[str, Any]:
    return {"method": "GET", "path": "/login/callback", "address": address, "status": 200}
