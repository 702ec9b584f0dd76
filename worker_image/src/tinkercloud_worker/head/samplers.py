"""Sampling sessions: which version of which weights each of them samples from.

A snapshot session keeps the version it was made with. The inflight sessions of a model share one
target, which each inflight save moves on (`tinker.types.SamplingClientKind`).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.ids import ModelId, SamplingSessionId
from tinkercloud_protocol.launch import SamplerSpec
from tinkercloud_protocol.paths import CheckpointPath
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.trainer import WeightsSnapshot
from tinkercloud_worker.head.backend import Backend


@dataclass(frozen=True, slots=True)
class Published:
    """Weights of a model that were never saved under a name, and who samples from them."""

    version: str
    sessions: Sequence[str]
    is_inflight: bool


class Samplers:
    """The sampling sessions a head knows. Belongs to one event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sessions: dict[str, asyncio.Task[str] | str] = {}
        """Session to its version: a name, or a task that publishes it."""
        self._specs: dict[str, SamplerSpec] = {}
        """Session of the base model or of a checkpoint to what it was made of."""
        self._inflight: dict[str, str] = {}
        """Model to the version its inflight sessions sample from now."""
        self._inflight_sessions: dict[str, str] = {}
        """Inflight session to its model."""
        self._snapshots: dict[str, str] = {}
        """Session to the model that published its weights, in order of publication."""
        self._published = 0

    def __len__(self) -> int:
        return len(self._sessions) + len(self._inflight_sessions)

    def register(self, session_id: SamplingSessionId, spec: SamplerSpec) -> None:
        """Make a session of the base model, or of a checkpoint, known. Repeating it is fine."""
        name = str(session_id)
        if name not in self._sessions:
            self._specs[name] = spec
            self._sessions[name] = asyncio.create_task(self._load(name, spec))

    async def _load(self, name: str, spec: SamplerSpec) -> str:
        weights: WeightsSnapshot | None = None
        if spec.model_path is not None:
            store = self._backend.store
            manifest = await store.manifest(CheckpointPath.parse(spec.model_path))
            if manifest.base_model != self._backend.config.model.name:
                raise InvalidRequest(
                    f"{spec.model_path} was trained on {manifest.base_model!r}, but this server"
                    f" holds {self._backend.config.model.name!r}"
                )
            wanted = formats.files_of_weights(manifest)
            manifest, files = await store.read(manifest.path, wanted)
            weights = await asyncio.to_thread(formats.decode_weights, manifest, files)
        await self._backend.sampler.publish(name, weights)
        return name

    async def publish(
        self, session_id: SamplingSessionId, model_id: ModelId, weights: WeightsSnapshot
    ) -> None:
        """Make a session that keeps these weights of a model."""
        name = str(session_id)
        await self._backend.sampler.publish(name, weights)
        self._sessions[name] = name
        self._snapshots[name] = str(model_id)

    async def publish_inflight(
        self, session_id: SamplingSessionId, model_id: ModelId, weights: WeightsSnapshot
    ) -> None:
        """Move all inflight sessions of a model on to these weights, and add one."""
        model = str(model_id)
        await self._move_on(model, weights)
        self._inflight_sessions[str(session_id)] = model

    async def _move_on(self, model: str, weights: WeightsSnapshot) -> None:
        self._published += 1
        version = f"{model}@{self._published}"
        await self._backend.sampler.publish(version, weights)
        previous, self._inflight[model] = self._inflight.get(model), version
        if previous is not None:
            await self._backend.sampler.retire(previous)

    def of_model(self, model_id: ModelId) -> list[Published]:
        """Return what lives only here of a model's weights, the latest first."""
        model = str(model_id)
        snapshots = [name for name, owner in self._snapshots.items() if owner == model]
        published = [Published(name, [name], is_inflight=False) for name in reversed(snapshots)]
        if (version := self._inflight.get(model)) is not None:
            sharing = [name for name, owner in self._inflight_sessions.items() if owner == model]
            published.insert(0, Published(version, sharing, is_inflight=True))
        return published

    async def restore(
        self, model_id: ModelId, published: Published, weights: WeightsSnapshot
    ) -> None:
        """Publish what another head had published, for all who sampled from it."""
        model = str(model_id)
        if published.is_inflight:
            await self._move_on(model, weights)
            self._inflight_sessions.update(dict.fromkeys(published.sessions, model))
            return
        for name in published.sessions:
            await self.publish(SamplingSessionId.parse(name), model_id, weights)

    async def version(self, session_id: SamplingSessionId) -> str:
        """Return the version a session samples from now.

        Raises:
            NotFound: the session is unknown here.
            InvalidRequest: its checkpoint can't be read.
        """
        name = str(session_id)
        if (model := self._inflight_sessions.get(name)) is not None:
            return self._inflight[model]
        session = self._sessions.get(name)
        if session is None:
            raise NotFound(f"sampling session {name!r} is unknown to this head")
        if isinstance(session, str):
            return session
        if session.done() and session.exception() is not None:
            # A store or a server that was away a moment ago may be there by now.
            session = asyncio.create_task(self._load(name, self._specs[name]))
            self._sessions[name] = session
        return await asyncio.shield(session)

    async def retire(self, session_id: SamplingSessionId) -> None:
        """Forget a session and, unless it shares them, its weights."""
        name = str(session_id)
        self._inflight_sessions.pop(name, None)
        self._snapshots.pop(name, None)
        self._specs.pop(name, None)
        session = self._sessions.pop(name, None)
        if isinstance(session, asyncio.Task):
            session.cancel()
        if session is not None:
            await self._backend.sampler.retire(name)

    async def retire_model(self, model_id: ModelId) -> None:
        """Forget a model's inflight target and the sessions that share it."""
        model = str(model_id)
        sharing = [name for name, owner in self._inflight_sessions.items() if owner == model]
        for name in sharing:
            del self._inflight_sessions[name]
        if (version := self._inflight.pop(model, None)) is not None:
            await self._backend.sampler.retire(version)
