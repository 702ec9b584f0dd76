"""How many models the heads of pools can hold, as they have measured.

A head is asked when a session waits for a place, and not more often than its answer is likely to
change. Without an answer, the slots of the pool count.
"""

import asyncio
from collections.abc import Iterable
from time import monotonic

from tinkercloud_operator.decide.pool_model import Cluster
from tinkercloud_operator.run.head_client import HeadClient

ASK_AGAIN_SECONDS = 15.0
"""Age at which an answer is asked for again, while a session waits."""


class PoolMemory:
    """The last answers of heads. Belongs to one event loop."""

    def __init__(self, client: HeadClient) -> None:
        """Know nothing.

        Args:
            client: sends requests to heads.
        """
        self._client = client
        self._asked_at: dict[str, float] = {}
        self.most_models: dict[str, int] = {}
        """How many models a head holds at most, by the incarnation of its process."""

    async def ask(self, clusters: Iterable[Cluster]) -> None:
        """Ask the heads of ready clusters whose answers are old."""
        async with asyncio.TaskGroup() as tasks:
            for cluster in clusters:
                if cluster.is_ready and cluster.endpoint and cluster.incarnation:
                    tasks.create_task(
                        self._ask(cluster.name, cluster.endpoint, cluster.incarnation)
                    )

    async def _ask(self, name: str, url: str, incarnation: str) -> None:
        if monotonic() - self._asked_at.get(incarnation, float("-inf")) < ASK_AGAIN_SECONDS:
            return
        most = await self._client.most_models(name, url)
        self._asked_at[incarnation] = monotonic()
        if most is None:
            self.most_models.pop(incarnation, None)
        else:
            self.most_models[incarnation] = most

    def forget(self, incarnation: str | None) -> None:
        """Forget the answer of a head that is gone."""
        if incarnation is not None:
            self._asked_at.pop(incarnation, None)
            self.most_models.pop(incarnation, None)
