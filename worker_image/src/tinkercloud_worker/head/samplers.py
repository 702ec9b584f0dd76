"""Sampling sessions: which version of which weights each of them samples from.

A snapshot session keeps the version it was made with. The inflight sessions of a model share one
target, which each inflight save moves on (`tinker.types.SamplingClientKind`).

Clients never say that they are done with a snapshot before their whole session ends, and many make
one at every step. So beyond `Limits.max_snapshot_bytes` the least recently used weights are let go,
whichever sampler keeps them: a checkpoint's are read again for the next sample, and a session of a
snapshot fails from then on. What is being sampled from stays, and so does each model's latest.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from tinkercloud_protocol.checkpoints import Manifest, base_mismatch
from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.ids import ModelId, SamplingSessionId
from tinkercloud_protocol.launch import SamplerSpec
from tinkercloud_protocol.paths import CheckpointPath
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.trainer import Publication
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.weights_lru import WeightsLru

log = structlog.get_logger(__name__)

_REMEMBERED = 1 << 14
"""Sessions whose weights were let go that are known by name."""


@dataclass(frozen=True, slots=True)
class Published:
    """Weights of a model that were never saved under a name, and who samples from them."""

    version: str
    sessions: Sequence[str]
    is_inflight: bool
    size_bytes: int


class Samplers:
    """The sampling sessions a head knows. Belongs to one event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._specs: dict[str, SamplerSpec] = {}
        """Session of the base model or of a checkpoint to what it is made of."""
        self._loads: dict[str, asyncio.Task[str]] = {}
        """Such a session to what publishes its version; one that was let go has none."""
        self._snapshots: dict[str, str | None] = {}
        """Session, also its version, to the model that published its weights, while that lives. In
        order of publication."""
        self._let_go: dict[str, str | None] = {}
        """The same of those that were let go, the earliest first."""
        self._inflight: dict[str, str] = {}
        """Model to the version its inflight sessions sample from now."""
        self._inflight_sessions: dict[str, str] = {}
        """Inflight session to its model."""
        self._kept = WeightsLru(backend.config.limits.max_snapshot_bytes)
        """By session; those of inflight sessions by version."""
        self._owners: dict[str, str] = {}
        """Model or session to its owner."""
        self._published = 0

    def __len__(self) -> int:
        return len(self._specs) + len(self._snapshots) + len(self._inflight_sessions)

    def register(self, session_id: SamplingSessionId, spec: SamplerSpec) -> None:
        """Make a session of the base model, or of a checkpoint, known. Repeating it is fine."""
        name = str(session_id)
        if name not in self._specs:
            self._specs[name] = spec
            self._owners[name] = spec.owner
            self._begin_load(name)

    def learn_owner(self, model_id: ModelId, owner: str) -> None:
        """Remember the owner of a model, who also owns the sessions of its weights."""
        self._owners[str(model_id)] = owner

    def owner_of(self, name: str) -> str | None:
        """Return the owner of a model or a session; None if it is unknown here."""
        return self._owners.get(name)

    def _begin_load(self, name: str) -> None:
        self._loads[name] = asyncio.create_task(self._load(name, self._specs[name]))

    async def _load(self, name: str, spec: SamplerSpec) -> str:
        version = self._new_version(name)
        if spec.model_path is None:
            await self._backend.sampler.publish(version, None)
            return version
        store = self._backend.store
        manifest = await store.manifest(CheckpointPath.parse(spec.model_path))
        self._check_is_meant(manifest, spec)
        wanted = formats.files_of_weights(manifest)
        manifest, files = await store.read(manifest.path, wanted)
        # It may be another by now.
        self._check_is_meant(manifest, spec)
        dtype = self._backend.config.trainer.dtype
        weights = await asyncio.to_thread(formats.decode_to_sample, manifest, files, dtype)
        await self._backend.sampler.publish(version, weights)
        self._kept.add(name, weights.size_bytes)
        return version

    def _check_is_meant(self, manifest: Manifest, spec: SamplerSpec) -> None:
        if manifest.base_model != self._backend.config.model.name:
            raise InvalidRequest(
                f"{spec.model_path} was trained on {manifest.base_model!r}, but this server"
                f" holds {self._backend.config.model.name!r}"
            )
        mismatch = base_mismatch(manifest, self._backend.base_fingerprint)
        if mismatch is not None:
            raise InvalidRequest(f"{spec.model_path} can't be sampled from: {mismatch}")
        if spec.saved_at not in {None, manifest.created_at}:
            raise InvalidRequest(
                "the weights this sampling session was made from are gone: what was saved at"
                f" {spec.model_path} at {spec.saved_at} was deleted or written over, and what is"
                f" there now was saved at {manifest.created_at}; create a new sampling client"
            )

    def _new_version(self, whose: str) -> str:
        self._published += 1
        return f"{whose}@{self._published}"

    def check_new(self, session_id: SamplingSessionId) -> None:
        """Check that a session samples from nothing yet.

        Raises:
            InvalidRequest: it was made before.
        """
        name = str(session_id)
        everything = (self._specs, self._snapshots, self._let_go, self._inflight_sessions)
        if any(name in known for known in everything):
            raise InvalidRequest(
                f"sampling_session_seq_id {session_id.index} was used before in this session, for"
                " weights that another request saved; use another"
            )

    async def publish(
        self, session_id: SamplingSessionId, model_id: ModelId, weights: Publication
    ) -> None:
        """Make a session that keeps these weights of a model."""
        name = str(session_id)
        await self._backend.sampler.publish(name, weights)
        self._owners[name] = self._owners.get(str(model_id), "")
        self._kept.add(name, weights.size_bytes)
        # Only now may the model's latest before go, and what is used more often stay.
        self._snapshots[name] = str(model_id)
        await self._make_room()

    async def publish_inflight(
        self, session_id: SamplingSessionId, model_id: ModelId, weights: Publication
    ) -> None:
        """Move all inflight sessions of a model on to these weights, and add one."""
        model = str(model_id)
        await self._move_on(model, weights)
        self._add_inflight(str(session_id), model)

    def _add_inflight(self, session: str, model: str) -> None:
        self._inflight_sessions[session] = model
        self._owners[session] = self._owners.get(model, "")

    async def _move_on(self, model: str, weights: Publication) -> None:
        version = self._new_version(model)
        await self._backend.sampler.publish(version, weights)
        self._kept.add(version, weights.size_bytes)
        previous, self._inflight[model] = self._inflight.get(model), version
        if previous is not None:
            await self._retire(previous, previous)
        await self._make_room()

    async def _make_room(self) -> None:
        """Let go of what was used the longest ago, one after another, until the rest fits."""
        while (name := self._kept.next_to_go(self._latest())) is not None:
            load = self._loads.pop(name, None)
            if load is None:
                self._let_go[name] = self._snapshots.pop(name)
                if len(self._let_go) > _REMEMBERED:
                    earliest = next(iter(self._let_go))
                    del self._let_go[earliest]
                    self._owners.pop(earliest, None)
            log.info("weights are let go", session=name, can_be_read_again=load is not None)
            await self._retire(name, name if load is None else load.result())

    def _latest(self) -> set[str]:
        """Return by which names the latest weights of models that live are kept."""
        snapshots = {model: name for name, model in self._snapshots.items() if model is not None}
        return {*snapshots.values(), *self._inflight.values()}

    async def _retire(self, name: str, version: str) -> None:
        self._kept.remove(name)
        await self._backend.sampler.retire(version)

    def of_model(self, model_id: ModelId) -> list[Published]:
        """Return what lives only here of a model's weights, the latest first."""
        model = str(model_id)
        snapshots = [name for name, owner in self._snapshots.items() if owner == model]
        published = [self._describe(each, [each], is_inflight=False) for each in snapshots[::-1]]
        if (version := self._inflight.get(model)) is not None:
            sharing = [name for name, owner in self._inflight_sessions.items() if owner == model]
            published.insert(0, self._describe(version, sharing, is_inflight=True))
        return published

    def _describe(self, version: str, sessions: Sequence[str], *, is_inflight: bool) -> Published:
        return Published(version, sessions, is_inflight, self._kept.size_of(version))

    def sessions_of_model(self, model_id: ModelId) -> set[str]:
        """Return the sessions of a model's own weights, also those whose weights were let go."""
        everyone = (self._snapshots, self._let_go, self._inflight_sessions)
        model = str(model_id)
        return {name for owners in everyone for name, owner in owners.items() if owner == model}

    async def restore(self, model_id: ModelId, published: Published, weights: Publication) -> None:
        """Publish what another head had published, for all who sampled from it."""
        model = str(model_id)
        if published.is_inflight:
            await self._move_on(model, weights)
            for name in published.sessions:
                self._add_inflight(name, model)
            return
        for name in published.sessions:
            await self.publish(SamplingSessionId.parse(name), model_id, weights)

    @asynccontextmanager
    async def sampling(self, session_id: SamplingSessionId) -> AsyncIterator[str]:
        """Have the version a session samples from now stay for as long as the context lasts.

        Raises:
            NotFound: the session is unknown here, or its weights were let go.
            InvalidRequest: its checkpoint can't be read.
        """
        name = str(session_id)
        with self._kept.used(name):
            yield await self._version(name)

    async def _version(self, name: str) -> str:
        if (model := self._inflight_sessions.get(name)) is not None:
            return self._inflight[model]
        if name in self._snapshots:
            return name
        if name not in self._specs:
            raise NotFound(self._why_unknown(name))
        load = self._loads.get(name)
        # A store or a server that was away a moment ago may be there by now.
        if load is None or (load.done() and load.exception() is not None):
            self._begin_load(name)
        version = await asyncio.shield(self._loads[name])
        await self._make_room()
        return version

    def _why_unknown(self, name: str) -> str:
        if name not in self._let_go:
            return (
                f"sampling session {name!r} is unknown to this head: it was deleted, or its weights"
                " were saved under no name, and it was too old to come along when the run moved to"
                " this head; save the weights again"
            )
        return (
            f"the weights of sampling session {name!r} were let go: they were saved under no name,"
            " and newer ones took their place (limits.max_snapshot_bytes is"
            f" {self._backend.config.limits.max_snapshot_bytes}). Weights that are to stay must be"
            " saved under one: save_weights_for_sampler(name), then"
            " create_sampling_client(model_path=...)"
        )

    async def retire(self, session_id: SamplingSessionId) -> None:
        """Forget a session and, unless it shares them, its weights."""
        name = str(session_id)
        self._owners.pop(name, None)
        self._inflight_sessions.pop(name, None)
        self._let_go.pop(name, None)
        self._specs.pop(name, None)
        load = self._loads.pop(name, None)
        if load is not None and not load.done():
            load.cancel()
        elif load is not None and load.exception() is None:
            await self._retire(name, load.result())
        elif name in self._snapshots:
            del self._snapshots[name]
            await self._retire(name, name)

    async def retire_model(self, model_id: ModelId) -> None:
        """Forget a model's inflight target and the sessions that share it."""
        model = str(model_id)
        self._owners.pop(model, None)
        for name in [name for name, owner in self._inflight_sessions.items() if owner == model]:
            del self._inflight_sessions[name]
            self._owners.pop(name, None)
        for name in [name for name, owner in self._snapshots.items() if owner == model]:
            self._snapshots[name] = None
        if (version := self._inflight.pop(model, None)) is not None:
            await self._retire(version, version)
