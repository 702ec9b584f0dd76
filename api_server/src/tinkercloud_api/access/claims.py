"""Who has a claim on objects whose rows a server remembers: their project, or their owner.

A session can be moved to another project, so what is remembered of it counts only for one version
of access rights.
"""

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.catalog.access.project_rows import Claim
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.paths import CheckpointPath

_MAX_CACHED = 10_000


class Claims:
    """Looks up the projects of sessions. Belongs to one event loop."""

    def __init__(self, catalog: Catalog) -> None:
        """Use a catalog."""
        self._catalog = catalog
        self._cached: dict[str, tuple[int, str | None]] = {}

    async def of(self, owner: str, session_id: str, principal: Principal) -> Claim:
        """Return who has a claim on an object.

        Args:
            owner: the owner of the object.
            session_id: the session that the object belongs to.
            principal: the caller.
        """
        return Claim(owner, await self._project(session_id, principal.version))

    async def check_source(self, text: str, principal: Principal) -> None:
        """Check that a caller may still read the checkpoint that it samples from.

        Args:
            text: path of the checkpoint, which the caller could read earlier.
            principal: the caller.

        Raises:
            NotFound: the checkpoint belongs to a project that the caller has left since.
        """
        path = CheckpointPath.parse(text)
        session_id = path.run_id.partition(":")[0]
        project = await self._project(session_id, principal.version)
        if project is None or principal.project_role(project) is not None:
            return
        row = await self._catalog.checkpoint(path)
        if row is None or not row.is_public:
            raise NotFound(f"checkpoint {path} does not exist, or belongs to another owner")

    async def _project(self, session_id: str, version: int) -> str | None:
        known = self._cached.get(session_id)
        if known is not None and known[0] == version:
            return known[1]
        project = await self._catalog.project_of_session(session_id)
        if len(self._cached) >= _MAX_CACHED:
            self._cached.clear()
        self._cached[session_id] = (version, project)
        return project
