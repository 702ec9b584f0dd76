"""Notifies heads whose samples they report, as the owners of runs want."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import structlog

from tinkercloud_api.catalog.runs.sample_texts import SampleTexts
from tinkercloud_api.heads.head_calls import HeadCalls
from tinkercloud_api.providers.base import HeadEndpoint, SessionProvider
from tinkercloud_protocol.heads.head_messages import SampledRuns as SampledRunsMessage
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable, WireError

log = structlog.get_logger(__name__)

_PERIOD_SECONDS = 5.0
"""How long a head that has just started may not know it."""
_CALL_SECONDS = 10.0
_MOST_FAILURES = 60
"""Calls in turn without an answer after which a head that has ended is forgotten."""


class SampledRuns:
    """Notifies each head of the runs whose samples it reports. Belongs to one event loop.

    A head is notified once, and again of changes, until it has answered. Other servers notify heads
    too, so that one may get a change twice.
    """

    def __init__(self, texts: SampleTexts, provider: SessionProvider, calls: HeadCalls) -> None:
        """Create it.

        Args:
            texts: has the runs.
            provider: has the heads.
            calls: to heads.
        """
        self._texts = texts
        self._provider = provider
        self._calls = calls
        self._notified: Mapping[HeadEndpoint, frozenset[str] | None] = {}
        """The runs that each head was notified of last; None if that may not have arrived."""
        self._failures = Counter[HeadEndpoint]()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Notify the heads soon: the owner of a run wants something else."""
        self._changed.set()

    async def follow(self) -> None:
        """Notify the heads of changes, for as long as the server runs."""
        while True:
            self._changed.clear()
            try:
                await self._notify()
            except Unavailable as error:
                log.warning("cannot find the runs whose samples are kept", error=error.message)
            except Exception:
                log.exception("cannot notify heads whose samples are kept; will retry")
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self._changed.wait()

    async def _notify(self) -> None:
        # Those that were notified earlier have to forget runs, also those of an earlier server.
        shared = set(self._provider.shared_heads())
        wanted = {head: set[str]() for head in (*self._notified, *shared)}
        for run_id, owner in await self._texts.keeping():
            for head in self._provider.heads_of(owner):
                wanted.setdefault(head, set()).add(run_id)
        known = await asyncio.gather(*(self._notify_head(*each) for each in wanted.items()))
        self._notified = {
            head: runs
            for head, runs in zip(wanted, known, strict=True)
            if self._failures[head] < _MOST_FAILURES and (runs != frozenset() or head in shared)
        }
        for head in self._failures.keys() - self._notified.keys():
            del self._failures[head]

    async def _notify_head(self, head: HeadEndpoint, runs: set[str]) -> frozenset[str] | None:
        """Notify a head, unless it knows; return what it knows for certain, None if nothing is."""
        if frozenset(runs) == self._notified.get(head):
            return frozenset(runs)
        body = SampledRunsMessage(runs=sorted(runs)).model_dump_json()
        try:
            await self._calls.put(head, routes.HEAD_SAMPLED_RUNS, body, _CALL_SECONDS)
        except InvalidRequest as error:
            log.info("a session head of an earlier version keeps no samples", error=error.message)
        except WireError as error:
            self._failures[head] += 1
            if self._failures[head] == 1:
                log.info(
                    "could not notify a session head whose samples are kept; will retry",
                    error=error.message,
                )
            return None
        del self._failures[head]
        return frozenset(runs)
