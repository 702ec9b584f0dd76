"""Retrieving results."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from tinkercloud_protocol.wire.errors import NotFound, Unavailable
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.order.kept_results import Results, sample_gone
from tinkercloud_worker.head.sampling.samplers import Samplers

log = structlog.get_logger(__name__)

_SHORTEST_POLL = 0.75
"""The shortest long poll, as a share of the longest: clients that began to wait together, as after
a restart, do not all poll again in the same moment."""


@dataclass(frozen=True, slots=True)
class Poll:
    """How a client asks for a result."""

    seconds: float | None = None
    """How long it waits; None means as long as a long poll."""
    max_bytes: int | None = None
    """Size above which only the metadata of a result is returned; None means that all of it is."""
    counts_as_read: bool = True
    """Whether the client may use up the result: its memory is needed for others once it is read."""


LONG_POLL = Poll()


class Retrieval:
    """Long polls for results. Belongs to one event loop."""

    def __init__(
        self,
        backend: Backend,
        results: Results,
        samplers: Samplers,
        recall: Callable[[str], Awaitable[None]],
    ) -> None:
        """Create it.

        Args:
            backend: its configuration limits polls.
            results: the results.
            samplers: the owners of sampling sessions.
            recall: resumes the model of a model id or sampling session.
        """
        self._config = backend.config
        self._results = results
        self._samplers = samplers
        self._recall = recall

    async def retrieve(self, request_id: str, poll: Poll) -> Result | None:
        """Wait for a result; None if it takes longer than a long poll, or than the client waits.

        Args:
            request_id: the request.
            poll: how the client asks for it.

        Raises:
            ResultGone: it is a sample, and no longer kept.
            NotFound: the request is unknown, or its result is no longer kept.
        """
        target = request_id.rpartition(":")[0]
        seconds = self._bounded(poll.seconds)
        if not await self._is_recalled(target, seconds):
            return None
        try:
            return await self._results.wait(
                request_id, seconds, poll.max_bytes, counts_as_read=poll.counts_as_read
            )
        except NotFound as error:
            owner = self._samplers.owner_of(target)
            if ":sample:" not in request_id or owner is None:
                raise
            raise sample_gone(error, owner, self._config.limits) from None

    def _bounded(self, seconds: float | None) -> float:
        longest = self._config.timings.long_poll_seconds
        if seconds is not None:
            return min(seconds, longest)
        return longest * random.uniform(_SHORTEST_POLL, 1)  # noqa: S311 - guards nothing

    async def _is_recalled(self, target: str, seconds: float) -> bool:
        """Resume the model of a target; return whether that succeeded in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._recall(target)
        except (TimeoutError, Unavailable) as error:
            # The SDK polls again.
            log.info(
                "a result is waiting for its model to resume", target=target, reason=str(error)
            )
            return False
        return True
