"""How many models the heads of pools can hold, as they have measured.

A head is asked when a session waits for a place or may be moved, and not more often than its answer
is likely to change. Without an answer, the smallest capacity in the pool is assumed; if no head has
answered, the slots of the pool count.

All heads are asked at the same time, and a plan waits a moment for their answers, but not for
unresponsive heads or pending requests. After a late answer, the pool is planned again.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic

import structlog

from tinkercloud_operator.decide.pool.head_answers import Asked, HeadMemory, head_memory
from tinkercloud_operator.decide.pool.pool_model import Cluster
from tinkercloud_operator.run.cluster.head_calls import HeadClient

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
        self._requests: dict[str, asyncio.Task[bool]] = {}
        """The requests that have not ended, by incarnation."""
        self.known: dict[str, HeadMemory] = {}
        """What heads hold, by incarnation."""

    async def ask(self, clusters: Iterable[Cluster], on_change: Callable[[], object]) -> None:
        """Ask the heads of ready clusters whose answers are old, and wait a moment for answers.

        It does not wait for answers to earlier requests.

        Args:
            clusters: clusters of a pool.
            on_change: called later, if a head then says something else than before.
        """
        asked = [each for each in clusters if each.is_ready and each.endpoint and each.incarnation]
        now = monotonic()
        started, awaited = [], []
        for cluster in asked:
            incarnation = cluster.incarnation or ""
            known = self._asked.get(incarnation, Asked())
            if incarnation not in self._requests and known.is_due(now):
                request = self._start(cluster, incarnation)
                started.append(request)
                if not known.is_silent:
                    awaited.append(request)
        if awaited:
            await asyncio.wait(awaited, timeout=_WAIT_SECONDS)
        for request in started:
            if not request.done():
                request.add_done_callback(partial(_note_late, on_change))

    def _start(self, cluster: Cluster, incarnation: str) -> asyncio.Task[bool]:
        request = asyncio.create_task(self._ask(cluster.name, cluster.endpoint or "", incarnation))
        self._requests[incarnation] = request
        request.add_done_callback(lambda _: self._requests.pop(incarnation, None))
        return request

    async def _ask(self, name: str, url: str, incarnation: str) -> bool:
        """Ask a head; return whether it says something else than before."""
        known = self._asked.get(incarnation, Asked())
        try:
            status = await self._client.head_status(name, url)
        except TimeoutError:
            # What it has said before is closer to the truth than that it has room for all slots.
            self._asked[incarnation] = known.failed(monotonic())
            return False
        except Exception:
            log.exception("asking a head what it can hold failed unexpectedly", session=name)
            self._asked[incarnation] = known.failed(monotonic())
            return False
        before = self.known.get(incarnation)
        memory = head_memory(status, before)
        if memory is None:
            # A head that has measured nothing yet will soon.
            self._asked.pop(incarnation, None)
            return False
        self._asked[incarnation] = known.answered(monotonic())
        self.known[incarnation] = memory
        return memory != before

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


def _note_late(on_change: Callable[[], object], request: asyncio.Task[bool]) -> None:
    """Tell what a head said that the plan that asked did not wait for."""
    if not request.cancelled() and request.result():
        on_change()
