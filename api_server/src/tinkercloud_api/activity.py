"""When sessions, runs and keys were last used: noted in memory, written to the catalog at times.

A heartbeat every ten seconds from every client, every request of every run and every use of a key
must not each become a write.
"""

from datetime import datetime

from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.tables import now
from tinkercloud_protocol.errors import Unavailable


class Activity:
    """Moments not yet written. Belongs to one event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._sessions: set[str] = set()
        self._runs: dict[str, datetime] = {}
        self._keys: dict[int, datetime] = {}

    def beat(self, session_id: str) -> None:
        """Note that a session's client is alive."""
        self._sessions.add(session_id)

    def touch(self, run_id: str) -> None:
        """Note that a run was used."""
        self._runs[run_id] = now()

    def use_key(self, key_id: int) -> None:
        """Note that a key was used."""
        self._keys[key_id] = now()

    async def write(self) -> None:
        """Write what has been noted since the last time.

        Raises:
            Unavailable: the catalog does not answer; nothing is forgotten.
        """
        sessions, self._sessions = self._sessions, set()
        runs, self._runs = self._runs, {}
        keys, self._keys = self._keys, {}
        try:
            await self._catalog.beat(sessions)
            await self._catalog.touch_runs(runs)
            await self._catalog.touch_keys(keys)
        except Unavailable:
            self._sessions |= sessions
            self._runs = runs | self._runs
            self._keys = keys | self._keys
            raise
