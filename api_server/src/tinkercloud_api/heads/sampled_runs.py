"""Notifies heads whose samples they report, as the owners of runs want."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import structlog

from tinkercloud_api.catalog.runs.sample_texts import SampleTexts
from tinkercloud_api.heads.head_calls import HeadCalls
from tinkercloud_api.providers.base import HeadEndpoint, SessionProvider
from tinkercloud_protocol.heads.head_messages import SampledRuns as SampledRunsMessage
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable, WireError

log = structlog.get_logger(__name__)

_PERIOD_SECONDS = 5.0
"""How long a head that has just started may not know it."""
_CALL_SECONDS = 10.0


class SampledRuns:
    """Notifies each head of the runs whose samples it reports. Belongs to one event loop.

    A head is notified again only of changes. One that has just started, which has another endpoint,
    knows of no run. Other servers notify heads too, so that one may get a change twice.
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
        self._notified: Mapping[HeadEndpoint, frozenset[str]] = {}
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
        # Those that were notified earlier have to forget runs.
        wanted = {head: set[str]() for head in (*self._notified, *self._provider.shared_heads())}
        for run_id, owner in await self._texts.keeping():
            for head in self._provider.heads_of(owner):
                wanted.setdefault(head, set()).add(run_id)
        known = await asyncio.gather(*(self._notify_head(*each) for each in wanted.items()))
        self._notified = {head: runs for head, runs in zip(wanted, known, strict=True) if runs}

    async def _notify_head(self, head: HeadEndpoint, runs: set[str]) -> frozenset[str]:
        """Notify a head, unless it knows; return the runs that it knows of for certain."""
        if runs == self._notified.get(head, frozenset()):
            return frozenset(runs)
        body = SampledRunsMessage(runs=sorted(runs)).model_dump_json()
        try:
            await self._calls.put(head, routes.HEAD_SAMPLED_RUNS, body, _CALL_SECONDS)
        except WireError as error:
            log.info(
                "could not tell a session head whose samples are kept; will retry",
                error=error.message,
            )
            return frozenset()
        return frozenset(runs)
