"""How many models the heads of pools can hold, as they have measured.

A head is asked when a session waits for a place or may be moved, and not more often than its answer
is likely to change. Without an answer it is taken to be like the smallest other head of the pool;
if no head has answered, the slots of the pool count.
"""

import asyncio
from collections.abc import Iterable
from time import monotonic

from tinkercloud_operator.decide.pool_model import Cluster
from tinkercloud_operator.run.head_client import HeadClient

ASK_AGAIN_SECONDS = 15.0
"""Age at which an answer is asked for again, while a session waits or may be moved."""


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
        try:
            most = await self._client.most_models(name, url)
        except TimeoutError:
            # What it has said before is closer to the truth than that it has room for all slots.
            self._asked_at[incarnation] = monotonic()
            return
        if most is not None:
            # A head that has measured nothing yet will soon.
            self._asked_at[incarnation] = monotonic()
            self.most_models[incarnation] = most

    def forget(self, incarnation: str | None) -> None:
        """Forget the answer of a head that is gone."""
        if incarnation is not None:
            self._asked_at.pop(incarnation, None)
            self.most_models.pop(incarnation, None)
