"""Last use of sessions, runs and keys: recorded in memory and written to the catalog in batches.

Heartbeats (one per client every ten seconds), requests and uses of keys must not each cause a
write.
"""

from datetime import datetime

from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.wire.errors import Unavailable


class Activity:
    """Times of last use that are not yet in the catalog. Belongs to one event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._sessions: set[str] = set()
        self._runs: dict[str, datetime] = {}
        self._keys: dict[int, datetime] = {}

    def record_heartbeat(self, session_id: str) -> None:
        """Record that a session's client is alive."""
        self._sessions.add(session_id)

    def touch(self, run_id: str) -> None:
        """Record that a run was used."""
        self._runs[run_id] = now()

    def use_key(self, key_id: int) -> None:
        """Record that a key was used."""
        self._keys[key_id] = now()

    async def write(self) -> None:
        """Write everything recorded since the last call to the catalog.

        Raises:
            Unavailable: the catalog does not respond; all records are kept.
        """
        sessions, self._sessions = self._sessions, set()
        runs, self._runs = self._runs, {}
        keys, self._keys = self._keys, {}
        try:
            await self._catalog.record_heartbeats(sessions)
            await self._catalog.touch_runs(runs)
            await self._catalog.touch_keys(keys)
        except Unavailable:
            self._sessions |= sessions
            self._runs = runs | self._runs
            self._keys = keys | self._keys
            raise
