"""Sampling sessions: of a base model, of a checkpoint, or of a model's current weights.

The SDK creates and numbers its sampling sessions. Other clients name weights instead. All requests
of an owner for the same weights share one sampling session, so that a client that repeats a request
creates no more of them: its number is derived from the weights, and it belongs to a session that
all such requests of the owner share.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.catalog.schema.tables import SamplingSession, Session
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.heads.activity import Activity
from tinkercloud_api.heads.known_runs import KnownRuns
from tinkercloud_api.providers.model_names import is_of
from tinkercloud_api.runs.direct_sessions import session_of
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_protocol.requests.sampling_requests import NamedWeights
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId, new_session_id
from tinkercloud_protocol.wire.paths import CheckpointPath

_CLIENT = "http-sampling"
"""SDK version that is recorded for the sessions of sampling requests without a sampling session."""
_DERIVED_INDEX = 1 << 61
"""Derived numbers start here; clients choose numbers below 2**31."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A base model, or a checkpoint of it."""

    base_model: str
    path: CheckpointPath | None
    saved_at: datetime | None

    @property
    def index(self) -> int:
        """A number for the sampling session of these weights: equal for equal weights."""
        text = f"{self.base_model}\n{self.path}\n{self.saved_at}"
        return _DERIVED_INDEX + (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 4)


@dataclass(frozen=True, slots=True)
class SamplingSessions:
    """Creates sampling sessions."""

    catalog: Catalog
    checkpoints: Checkpoints
    known: KnownRuns
    training_runs: TrainingRuns
    activity: Activity

    async def create(
        self, session_id: str, index: int | None, named: NamedWeights, principal: Principal
    ) -> str:
        """Create a sampling session of a client's session; return its id.

        Args:
            session_id: the client's session.
            index: number of the sampling session; None derives it from the weights.
            named: a base model or a checkpoint.
            principal: the caller.

        Raises:
            NotFound: the session or the checkpoint does not exist for this principal.
            InvalidRequest: the session has ended, the base model is not served, or the number was
                already used for other weights.
        """
        await self.training_runs.active_session(session_id, principal)
        weights = await self._resolve(named, principal)
        number = weights.index if index is None else index
        row = await self.known.add_sampler(
            SamplingSession(
                id=str(SamplingSessionId(session_id, number)),
                session_id=session_id,
                owner=principal.owner,
                base_model=weights.base_model,
                model_path=str(weights.path) if weights.path else None,
                run_id=None,
                saved_at=weights.saved_at,
            )
        )
        principal.named_objects.add(row.id)
        return row.id

    async def of(self, named: NamedWeights, principal: Principal) -> str:
        """Return the sampling session of weights that a request names.

        Raises:
            NotFound: the model or the checkpoint does not exist for this principal.
            InvalidRequest: the base model is not served.
        """
        if named.model_id is not None:
            model_id = ModelId.parse(named.model_id)
            await self.known.authorize_run(str(model_id), principal)
            return str(SamplingSessionId.of_current_weights(model_id))
        weights = await self._resolve(named, principal)
        session = await self._shared_session(principal)
        self.activity.record_heartbeat(session.id)
        sampler_id = str(SamplingSessionId(session.id, weights.index))
        if await self.known.sampler(sampler_id) is not None:
            return sampler_id
        return await self.create(session.id, weights.index, named, principal)

    async def check(self, named: NamedWeights, principal: Principal) -> datetime | None:
        """Check that a principal may sample weights, without creating anything.

        Returns:
            When they were saved; None if they are no checkpoint.

        Raises:
            NotFound: the model or the checkpoint does not exist for this principal.
            InvalidRequest: the base model is not served.
        """
        if named.model_id is not None:
            await self.known.authorize_run(str(ModelId.parse(named.model_id)), principal)
            return None
        return (await self._resolve(named, principal)).saved_at

    async def _shared_session(self, principal: Principal) -> Session:
        session = await self.catalog.open_session(principal.owner, _CLIENT)
        if session is None:
            session = session_of(new_session_id(), principal, client=_CLIENT)
            await self.catalog.add_session(session)
        return session

    async def _resolve(self, named: NamedWeights, principal: Principal) -> SavedWeights:
        base_model, path, saved_at = named.base_model, None, None
        if named.model_path is not None:
            path = CheckpointPath.parse(named.model_path)
            path.require_loadable()
            manifest = await self.checkpoints.manifest(path, principal)
            models = self.training_runs.provider.models()
            if base_model is not None and not is_of(base_model, manifest.base_model, models):
                raise InvalidRequest(
                    f"base_model: {path} was trained on {manifest.base_model!r}, not {base_model!r}"
                )
            base_model, saved_at = manifest.base_model, manifest.created_at
        if base_model is None:
            raise InvalidRequest("set base_model (a served model) or model_path (a checkpoint)")
        served = self.training_runs.served(base_model)
        return SavedWeights(served.name, path, saved_at)
