"""How many models the heads of pools can hold, as they have measured.

A head is asked when a session waits for a place or may be moved, and not more often than its answer
is likely to change. Without an answer it is taken to be like the smallest other head of the pool;
if no head has answered, the slots of the pool count.

All heads are asked at the same time, and a plan waits a moment for their answers; for one that did
not answer last time it does not wait. A late answer has the pool planned again.
"""

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic

import structlog

from tinkercloud_operator.decide.head_answers import Asked, HeadMemory, head_memory
from tinkercloud_operator.decide.pool_model import Cluster
from tinkercloud_operator.run.head_client import HeadClient

log = structlog.get_logger(__name__)

_WAIT_SECONDS = 1.0
"""How long a plan waits for answers."""


class PoolMemory:
    """The last answers of heads. Belongs to one event loop."""

    def __init__(self, client: HeadClient) -> None:
        """Know nothing.

        Args:
            client: sends requests to heads.
        """
        self._client = client
        self._asked: dict[str, Asked] = {}
        """By the incarnation of the head's process."""
        self._requests: dict[str, asyncio.Task[None]] = {}
        """The requests that have not ended, by incarnation."""
        self.known: dict[str, HeadMemory] = {}
        """What heads hold, by incarnation."""

    async def ask(self, clusters: Iterable[Cluster], on_change: Callable[[], object]) -> None:
        """Ask the heads of ready clusters whose answers are old, and wait a moment for answers.

        Args:
            clusters: clusters of a pool.
            on_change: called whenever a head says something else than before.
        """
        asked = [each for each in clusters if each.is_ready and each.endpoint and each.incarnation]
        now = monotonic()
        awaited = []
        for cluster in asked:
            incarnation = cluster.incarnation or ""
            known = self._asked.get(incarnation, Asked())
            if incarnation not in self._requests and known.is_due(now):
                self._start(cluster, incarnation, on_change)
            if incarnation in self._requests and not known.is_silent:
                awaited.append(self._requests[incarnation])
        if awaited:
            await asyncio.wait(awaited, timeout=_WAIT_SECONDS)

    def _start(self, cluster: Cluster, incarnation: str, on_change: Callable[[], object]) -> None:
        request = asyncio.create_task(
            self._ask(cluster.name, cluster.endpoint or "", incarnation, on_change)
        )
        self._requests[incarnation] = request
        request.add_done_callback(lambda _: self._requests.pop(incarnation, None))

    async def _ask(
        self, name: str, url: str, incarnation: str, on_change: Callable[[], object]
    ) -> None:
        known = self._asked.get(incarnation, Asked())
        try:
            status = await self._client.head_status(name, url)
        except TimeoutError:
            # What it has said before is closer to the truth than that it has room for all slots.
            self._asked[incarnation] = known.failed(monotonic())
            return
        except Exception:
            log.exception("asking a head what it can hold failed unexpectedly", session=name)
            self._asked[incarnation] = known.failed(monotonic())
            return
        before = self.known.get(incarnation)
        memory = head_memory(status, before)
        if memory is None:
            # A head that has measured nothing yet will soon.
            self._asked.pop(incarnation, None)
            return
        self._asked[incarnation] = known.answered(monotonic())
        if memory != before:
            self.known[incarnation] = memory
            on_change()

    def forget(self, incarnation: str | None) -> None:
        """Forget the answer of a head that is gone."""
        if incarnation is None:
            return
        request = self._requests.pop(incarnation, None)
        if request is not None:
            request.cancel()
        self._asked.pop(incarnation, None)
        self.known.pop(incarnation, None)

    def close(self) -> None:
        """End the requests that have not ended."""
        for request in [*self._requests.values()]:
            request.cancel()
