"""The current weights of models, for sampling without saving them first.

Each model has one sampling session (`ids.SamplingSessionId.of_current_weights`) whose samples use
the weights after all requests of the model that had arrived before the sample. They are published
only if they have changed since the last sample, and each version is retired when the next one
replaces it and its last sample has ended. So there is at most one version per model, apart from
those in use.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_worker.engine.sampling.sampler_interface import Sampler
from tinkercloud_worker.engine.trainer import Publication
from tinkercloud_worker.head.sampling.weights_lru import WeightsLru


class Weights(Protocol):
    """The weights of a model in training."""

    @property
    def num_changes(self) -> int:
        """How often they may have changed."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the model has taken."""

    async def publication(self) -> Publication:
        """Return them, stored where samplers read them."""


RunInOrder = Callable[[Callable[[], Awaitable["_Version"]]], Awaitable["_Version"]]
"""Runs work after the requests of a model that have arrived (`ModelQueue.run_after_accepted`)."""


@dataclass(slots=True, eq=False)
class _Version:
    """Published weights."""

    name: str
    num_changes: int
    num_users: int = 0
    is_replaced: bool = False


class CurrentWeights:
    """The published current weights of a head's models. Belongs to one event loop."""

    def __init__(self, sampler: Sampler, usage: WeightsLru) -> None:
        """Start without models.

        Args:
            sampler: publishes and retires versions.
            usage: accounts for them.
        """
        self._sampler = sampler
        self._usage = usage
        self._sources: dict[str, tuple[Weights, RunInOrder]] = {}
        self._versions: dict[str, _Version] = {}
        """Model to its latest version."""
        self._num_versions = 0

    def add(self, model: str, weights: Weights, run_in_order: RunInOrder) -> None:
        """Add a model; one of the same name is replaced."""
        self._sources[model] = weights, run_in_order

    @property
    def names(self) -> Set[str]:
        """Names of the latest versions, which must not be evicted."""
        return {version.name for version in self._versions.values()}

    @asynccontextmanager
    async def sampling(self, model: str) -> AsyncIterator[str]:
        """Return the version of a model's current weights, which stays until the context ends.

        Raises:
            NotFound: the model is unknown here.
            WireError: it accepts no requests.
        """
        source = self._sources.get(model)
        if source is None:
            raise NotFound(f"model {model!r} does not exist on this session head")
        weights, run_in_order = source
        version = await run_in_order(lambda: self._publish_if_changed(model, weights))
        version.num_users += 1
        try:
            with self._usage.used(version.name):
                yield version.name
        finally:
            version.num_users -= 1
            await self._retire_unless_needed(version)

    async def _publish_if_changed(self, model: str, weights: Weights) -> _Version:
        previous = self._versions.get(model)
        # No request of the model runs meanwhile.
        num_changes = weights.num_changes
        if previous is not None and previous.num_changes == num_changes:
            return previous
        self._num_versions += 1
        version = _Version(f"{model}@current-{self._num_versions}", num_changes)
        publication = await weights.publication()
        await self._sampler.publish(version.name, publication)
        self._usage.add(version.name, publication.size_bytes, weights.steps)
        self._versions[model] = version
        if previous is not None:
            previous.is_replaced = True
            await self._retire_unless_needed(previous)
        return version

    async def remove(self, model: str) -> None:
        """Remove a model, which may be unknown; samples that have started finish."""
        self._sources.pop(model, None)
        version = self._versions.pop(model, None)
        if version is not None:
            version.is_replaced = True
            await self._retire_unless_needed(version)

    async def _retire_unless_needed(self, version: _Version) -> None:
        if version.is_replaced and not version.num_users:
            self._usage.remove(version.name)
            await self._sampler.retire(version.name)
