"""What API servers do about models that heads keep although no run has a place there.

See `tinkercloud_api.heads.shared_heads.SharedHeads.drop_orphans`.
"""

import asyncio
from collections.abc import Callable, Mapping

from tinkercloud_protocol.wire import routes
from tinkercloud_testing.simulation.cluster.api_server import ApiServer, Json
from tinkercloud_testing.simulation.cluster.connection import HeadRefused
from tinkercloud_testing.simulation.cluster.heads import Head
from tinkercloud_testing.simulation.store import Store

_PERIOD_SECONDS = 60.0
_ORPHANED_SECONDS = 600.0
"""How long no run must have claimed a model before it is dropped."""


class Orphans:
    """Drops models of the heads of pools that no run claims.

    Args:
        server: the API server of Kubernetes.
        store: the checkpoint store.
        heads: the living heads, by incarnation.
        note: called with what happens.
    """

    def __init__(
        self,
        server: ApiServer,
        store: Store,
        heads: Mapping[str, Head],
        note: Callable[[str], object],
    ) -> None:
        self._server = server
        self._store = store
        self._heads = heads
        self._note = note
        self.unclaimed: dict[tuple[str, str], float] = {}
        """Incarnations of heads and runs, with the time since when nothing claims the run there."""

    async def drop(self) -> None:
        """Drop models, forever."""
        while True:
            await asyncio.sleep(_PERIOD_SECONDS)
            await self._look(asyncio.get_running_loop().time())

    async def _look(self, now: float) -> None:
        seen: dict[tuple[str, str], float] = {}
        for cluster in self._server.all("TrainingSession"):
            head = self._head_of(cluster)
            if head is None:
                continue
            for run in sorted(head.models.keys() - self._placed_on(cluster["metadata"]["name"])):
                key = (head.incarnation, run)
                seen[key] = self.unclaimed.get(key, now)
                if now - seen[key] >= _ORPHANED_SECONDS and await self._drop(head, run):
                    del seen[key]
        self.unclaimed = seen

    def _head_of(self, cluster: Json) -> Head | None:
        status = cluster.get("status", {})
        if cluster["spec"].get("role") != "Pool" or "endpoint" not in status:
            return None
        head = self._heads.get(status.get("incarnation", ""))
        return head if head is not None and head.serves else None

    def _placed_on(self, cluster: str) -> set[str]:
        return {
            each["spec"]["modelId"]
            for each in self._server.all("TrainingSession")
            if each["spec"].get("poolCluster") == cluster and "modelId" in each["spec"]
        }

    async def _drop(self, head: Head, run: str) -> bool:
        """Drop a model, after a last checkpoint if this head had the run last; or say why not."""
        if self._store.claims.get(run) == head.incarnation:
            if any(
                each["spec"].get("modelId") == run for each in self._server.all("TrainingSession")
            ):
                return False
            try:
                await head.answer("POST", f"{routes.HEAD_CHECKPOINT}/{run}")
            except HeadRefused:
                return False
        self._note(f"API servers drop {run} from head {head.incarnation}")
        await head.answer("DELETE", f"{routes.HEAD_MODELS}/{run}")
        return True
