"""Sampling sessions, and the version of the weights that each of them samples from.

A session of an unnamed version keeps the version it was created with. The inflight sessions of a
model share one version, which every inflight save replaces (`tinker.types.SamplingClientKind`).

Clients release versions only when their whole session ends, and many create one at every step. So
beyond `Limits.max_snapshot_bytes` the least recently used weights are evicted, whichever sampler
holds them. Weights of a checkpoint, and adapters of unnamed versions, which move to the checkpoint
store, are loaded again for the next sample. Unnamed versions of whole models, and adapters that are
too many for `Limits.max_stored_snapshot_bytes`, are lost. Weights in use, and the latest of each
model, are never evicted.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from tinkercloud_protocol.heads.launch import SamplerSpec
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, WireError
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId, model_of_sampler
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_worker.checkpoints.suspended import EvictedSampler
from tinkercloud_worker.engine.trainer import Publication, WeightsCopy
from tinkercloud_worker.engine.turns.usage_counts import Payer
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.sampling.checkpoint_weights import read_to_sample
from tinkercloud_worker.head.sampling.current_weights import CurrentWeights
from tinkercloud_worker.head.sampling.evicted_weights import EvictedWeights, gone, unknown
from tinkercloud_worker.head.sampling.weights_lru import WeightsLru

log = structlog.get_logger(__name__)

_REMEMBERED = 1 << 14
"""Evicted sessions that are remembered by name."""


@dataclass(frozen=True, slots=True)
class Published:
    """Weights of a model that were never saved under a name, and their sampling sessions."""

    version: str
    sessions: Sequence[str]
    is_inflight: bool
    size_bytes: int
    step: int | None = None
    """Number of optimizer steps that they have taken; None if it is not known."""


class Samplers:
    """The sampling sessions of a head. Belongs to one event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._specs: dict[str, SamplerSpec] = {}
        """Specification of each session of the base model or of a checkpoint."""
        self._loads: dict[str, asyncio.Task[str]] = {}
        """Task that publishes the version of such a session, or publishes one that was evicted
        again. Without the task, its weights are not published."""
        self._unnamed: dict[str, str | None] = {}
        """Session, which is also its version, to the model that published its weights; None once
        the model is gone. In order of publication, evicted ones included."""
        self._evicted: dict[str, None] = {}
        """Sessions of unnamed versions that were evicted once, the first first."""
        self._storing: dict[str, asyncio.Task[None]] = {}
        """Versions that are being evicted, and may be stored."""
        self._adapters: set[str] = set()
        """Sessions of unnamed versions that can be stored."""
        limits = backend.config.limits
        self.evicted = EvictedWeights(backend.store, limits.max_stored_snapshot_bytes)
        """The weights of evicted versions."""
        self._inflight: dict[str, str] = {}
        """Model to the current version of its inflight sessions."""
        self._inflight_sessions: dict[str, str] = {}
        """Inflight session to its model."""
        self._usage = WeightsLru(limits.max_snapshot_bytes)
        """Weights by session; those of inflight sessions by version."""
        self.current = CurrentWeights(backend.sampler, self._usage)
        """The current weights of the head's models, which their sessions sample."""
        self._owners: dict[str, str] = {}
        """Model or session to its owner."""
        self._num_versions = 0

    def __len__(self) -> int:
        versions = len(self._unnamed) - len(self._evicted)
        return len(self._specs) + versions + len(self._inflight_sessions)

    def register(self, session_id: SamplingSessionId, spec: SamplerSpec) -> None:
        """Register a session of the base model or of a checkpoint. Idempotent."""
        name = str(session_id)
        if name not in self._specs:
            self._specs[name] = spec
            self._owners[name] = spec.owner
            self._begin_load(name)

    def record_owner(self, model_id: ModelId | SamplingSessionId, owner: str) -> None:
        """Record the owner of a model, who also owns the sessions of its weights."""
        self._owners[str(model_id)] = owner

    def owner_of(self, name: str) -> str | None:
        """Return the owner of a model or a session; None if it is unknown here."""
        return self._owners.get(model_of_sampler(name) or name)

    def payer_of(self, session_id: SamplingSessionId) -> Payer:
        """Return who pays for a request to a session: its owner, for the model that it samples."""
        name = str(session_id)
        model = session_id.model or self._inflight_sessions.get(name) or self._unnamed.get(name)
        spec = self._specs.get(name)
        if model is None and spec is not None and spec.model_path is not None:
            model = CheckpointPath.parse(spec.model_path).run_id
        return Payer(self.owner_of(name) or "", session_id.session_id, str(model or ""))

    def step_of(self, session_id: SamplingSessionId, version: str) -> int | None:
        """Return how many optimizer steps the weights of a session have taken; None if unknown.

        Args:
            session_id: the session.
            version: its version that is in use.
        """
        of_version = self._usage.step_of(version)
        return self._usage.step_of(str(session_id)) if of_version is None else of_version

    def _begin_load(self, name: str) -> None:
        self._loads[name] = asyncio.create_task(self._load(name, self._specs.get(name)))

    async def _load(self, name: str, spec: SamplerSpec | None) -> str:
        """Publish the weights of a session, evicted ones if `spec` is None; return the version."""
        version = self._new_version(name)
        weights: WeightsCopy | None = None
        step = None
        if spec is None:
            weights = await self._evicted_weights(name)
        elif spec.model_path is not None:
            weights, step = await read_to_sample(self._backend, spec, spec.model_path)
        await self._backend.sampler.publish(version, weights)
        if weights is not None:
            self._usage.add(name, weights.size_bytes, step)
        return version

    async def _evicted_weights(self, name: str) -> WeightsCopy:
        try:
            return await self.evicted.read(name)
        except NotFound:
            raise self._unknown(name) from None

    def _new_version(self, name: str) -> str:
        self._num_versions += 1
        return f"{name}@{self._num_versions}"

    def check_new(self, session_id: SamplingSessionId) -> None:
        """Check that a session does not exist yet.

        Raises:
            InvalidRequest: it exists.
        """
        name = str(session_id)
        all_sessions = (self._specs, self._unnamed, self._inflight_sessions)
        if any(name in known for known in all_sessions):
            raise InvalidRequest(
                f"sampling_session_seq_id: {session_id.index} was already used in this session"
                " for other weights; use the next unused number"
            )

    async def publish(
        self,
        session_id: SamplingSessionId,
        model_id: ModelId,
        weights: Publication,
        step: int | None = None,
    ) -> None:
        """Create a session that keeps these weights of a model, which have taken so many steps."""
        name = str(session_id)
        await self._backend.sampler.publish(name, weights)
        self._owners[name] = self._owners.get(str(model_id), "")
        self._usage.add(name, weights.size_bytes, step)
        # Only now may the model's previous weights be evicted.
        self._unnamed[name] = str(model_id)
        if isinstance(weights, WeightsCopy) and weights.lora is not None:
            self._adapters.add(name)
        await self._evict_to_fit()

    async def publish_inflight(
        self,
        session_id: SamplingSessionId,
        model_id: ModelId,
        weights: Publication,
        step: int | None = None,
    ) -> None:
        """Switch all inflight sessions of a model to these weights, and add one."""
        model = str(model_id)
        await self._switch_inflight(model, weights, step)
        self._add_inflight(str(session_id), model)

    def _add_inflight(self, session: str, model: str) -> None:
        self._inflight_sessions[session] = model
        self._owners[session] = self._owners.get(model, "")

    async def _switch_inflight(self, model: str, weights: Publication, step: int | None) -> None:
        version = self._new_version(model)
        await self._backend.sampler.publish(version, weights)
        self._usage.add(version, weights.size_bytes, step)
        previous, self._inflight[model] = self._inflight.get(model), version
        if previous is not None:
            await self._retire(previous, previous)
        await self._evict_to_fit()

    async def _evict_to_fit(self) -> None:
        """Evict the least recently used weights until the rest fits."""
        while (name := self._usage.next_to_go(self._latest())) is not None:
            load = self._loads.pop(name, None)
            # Nobody else evicts it from here on, and it may be loaded again before it is retired.
            self._usage.remove(name)
            if load is None:
                self._evicted[name] = None
                # A sample that arrives meanwhile waits: the weights may return.
                storing = self._storing[name] = asyncio.create_task(self._store(name))
                try:
                    await storing
                finally:
                    self._storing.pop(name, None)
            can_be_reloaded = load is not None or name in self.evicted
            log.info("weights were evicted", session=name, can_be_reloaded=can_be_reloaded)
            await self._backend.sampler.retire(name if load is None else load.result())
            while len(self._evicted) > _REMEMBERED:
                await self.retire(SamplingSessionId.parse(next(iter(self._evicted))))

    async def _store(self, name: str) -> None:
        """Begin to store the weights of a version that is being evicted, if they can be stored."""
        if name not in self._adapters or self.evicted.is_off:
            return
        if not await self.evicted.ready():
            log.warning("evicted weights can't be stored", session=name, reason="the store is slow")
            return
        try:
            weights = await self._backend.sampler.export(name)
        except (WireError, OSError) as error:
            log.warning("evicted weights can't be stored", session=name, reason=str(error))
            return
        # It may have been deleted meanwhile, or its model may be.
        model = self._unnamed.get(name)
        if weights is not None and model is not None:
            self.evicted.begin(name, model, self._owners.get(model, ""), weights)

    def _latest(self) -> set[str]:
        """Return the names under which the latest weights of live models are kept."""
        latest = {model: name for name, model in self._unnamed.items() if model is not None}
        return {*latest.values(), *self._inflight.values(), *self.current.names}

    async def _retire(self, name: str, version: str) -> None:
        self._usage.remove(name)
        await self._backend.sampler.retire(version)

    def of_model(self, model_id: ModelId) -> list[Published]:
        """Return the weights of a model that exist only here, the latest first."""
        model = str(model_id)
        published = [
            self._describe(name, [name], is_inflight=False)
            for name in reversed(_of_model(model, self._unnamed))
            if name not in self._evicted
        ]
        if (version := self._inflight.get(model)) is not None:
            sharing = _of_model(model, self._inflight_sessions)
            published.insert(0, self._describe(version, sharing, is_inflight=True))
        return published

    def _describe(self, version: str, sessions: Sequence[str], *, is_inflight: bool) -> Published:
        size, step = self._usage.size_of(version), self._usage.step_of(version)
        return Published(version, sessions, is_inflight, size, step)

    def sessions_of_model(self, model_id: ModelId) -> set[str]:
        """Return the sessions of a model's own weights, including evicted ones."""
        model, current = str(model_id), str(SamplingSessionId.of_current_weights(model_id))
        inflight = _of_model(model, self._inflight_sessions)
        return {*_of_model(model, self._unnamed), *inflight, current}

    def unnamed_of_model(self, model_id: ModelId) -> list[str]:
        """Return the sessions of a model's unnamed versions in their order, with evicted ones."""
        return _of_model(str(model_id), self._unnamed)

    async def settled(self) -> None:
        """Wait until all weights that are being evicted are stored.

        No longer than for a slow store (`EvictedWeights.ready`): then they count as lost.
        """
        if self._storing:
            await asyncio.wait(set(self._storing.values()))
        await self.evicted.ready()

    def restore_evicted(self, model_id: ModelId, evicted: Sequence[EvictedSampler]) -> None:
        """Take over the evicted weights of a model from another head.

        Before those that are not evicted: the last of a model counts as its latest.
        """
        for each in evicted:
            self._unnamed[each.session] = str(model_id)
            self._evicted[each.session] = None
            self._owners[each.session] = self._owners.get(str(model_id), "")
            self.evicted.add(each, self._owners[each.session])

    async def restore(self, model_id: ModelId, published: Published, weights: Publication) -> None:
        """Publish weights that another head had published, for all their sessions."""
        model = str(model_id)
        if published.is_inflight:
            await self._switch_inflight(model, weights, published.step)
            for name in published.sessions:
                self._add_inflight(name, model)
            return
        for name in published.sessions:
            await self.publish(SamplingSessionId.parse(name), model_id, weights, published.step)

    @asynccontextmanager
    async def sampling(self, session_id: SamplingSessionId) -> AsyncIterator[str]:
        """Return the current version of a session, which stays until the context ends.

        Raises:
            NotFound: the session is unknown here, or its weights were evicted.
            InvalidRequest: its checkpoint can't be read.
        """
        if session_id.model is not None:
            async with self.current.sampling(str(session_id.model)) as version:
                await self._evict_to_fit()
                yield version
            return
        name = str(session_id)
        with self._usage.used(name):
            yield await self._version(name)

    async def _version(self, name: str) -> str:
        if (model := self._inflight_sessions.get(name)) is not None:
            return self._inflight[model]
        if name in self._unnamed and name not in self._evicted:
            return name
        if (storing := self._storing.get(name)) is not None:
            await asyncio.wait({storing})
        load = self._loads.get(name)
        if load is None and name not in self._specs and name not in self.evicted:
            raise self._unknown(name)
        # A store or server that was unreachable may be back.
        if load is None or (load.done() and load.exception() is not None):
            self._begin_load(name)
        version = await asyncio.shield(self._loads[name])
        await self._evict_to_fit()
        return version

    def _unknown(self, name: str) -> NotFound:
        return gone(name, self._backend.config.limits) if name in self._evicted else unknown(name)

    async def retire(self, session_id: SamplingSessionId) -> None:
        """Remove a session, and its weights unless they are shared."""
        await self._remove(str(session_id))
        await self.evicted.remove(str(session_id))

    async def leave(self, session_id: SamplingSessionId) -> None:
        """Remove a session that another head, or this one later, restores with its model."""
        await self._remove(str(session_id))
        self.evicted.forget(str(session_id))

    async def _remove(self, name: str) -> None:
        self._owners.pop(name, None)
        self._inflight_sessions.pop(name, None)
        self._specs.pop(name, None)
        self._adapters.discard(name)
        is_published = name in self._unnamed and name not in self._evicted
        self._unnamed.pop(name, None)
        self._evicted.pop(name, None)
        load = self._loads.pop(name, None)
        if load is not None and not load.done():
            load.cancel()
        elif load is not None and load.exception() is None:
            await self._retire(name, load.result())
        elif is_published:
            await self._retire(name, name)

    async def retire_model(self, model_id: ModelId) -> None:
        """Remove a model's inflight version and the sessions that share it."""
        model = str(model_id)
        await self.current.remove(model)
        self._owners.pop(model, None)
        for name in _of_model(model, self._inflight_sessions):
            del self._inflight_sessions[name]
            self._owners.pop(name, None)
        for name in _of_model(model, self._unnamed):
            self._unnamed[name] = None
        if (version := self._inflight.pop(model, None)) is not None:
            await self._retire(version, version)


def _of_model(model: str, sessions: Mapping[str, str | None]) -> list[str]:
    """Return those of the sessions, which are given with their models, that are of a model."""
    return [name for name, owner in sessions.items() if owner == model]
