"""Sessions and model numbers for clients that send neither.

The SDK creates a session and numbers its models. A client that only sends `create_model` gets a new
session, or the lowest unused number of the session that it names. Requests with the same
`X-Idempotency-Key` get the same model: every replica derives the same id from the key.
"""

import hashlib
import uuid
from dataclasses import dataclass

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.catalog.schema.tables import Session
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_protocol.requests.training_requests import CreateModelRequest
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId, new_session_id

_MAX_KEY_CHARACTERS = 256
_NAMESPACE = uuid.UUID("c8b9f2b0-6f5b-4a57-9d53-0f9a4f1d3c52")
_CLIENT = "http"
"""SDK version that is recorded for sessions without an SDK."""
_DERIVED_INDEX = 1 << 30
"""Models that are numbered by an idempotency key have numbers from this one on."""


@dataclass(frozen=True, slots=True)
class DirectSessions:
    """Creates models of clients that may have no session and no numbers."""

    catalog: Catalog
    training_runs: TrainingRuns

    async def create_model(
        self, request: CreateModelRequest, principal: Principal, idempotency_key: str | None
    ) -> str:
        """Create a model, and its session if the request names none; return the request's id.

        Raises:
            NotFound: the session does not exist for this principal.
            InvalidRequest: the idempotency key is too long, or `TrainingRuns.create` rejects it.
        """
        key = idempotency_key or None
        if key is not None and len(key) > _MAX_KEY_CHARACTERS:
            raise InvalidRequest(
                f"{routes.IDEMPOTENCY_HEADER}: has {len(key)} characters; at most"
                f" {_MAX_KEY_CHARACTERS} are accepted"
            )
        # Reject what would fail anyway before a session exists.
        self.training_runs.served_for(request)
        session_id = request.session_id or await self._new_session(principal, key)
        index = request.model_seq_id
        if index is None and key is not None:
            index = _DERIVED_INDEX + _number(key) if request.session_id is not None else 0
        if index is not None:
            model_id = ModelId(session_id, index)
            return (await self.training_runs.create(request, model_id, principal)).request_id
        while True:
            model_id = ModelId(session_id, await self._unused(session_id))
            created = await self.training_runs.create(request, model_id, principal)
            # Another request may have used the number meanwhile.
            if created.is_new:
                return created.request_id

    async def _new_session(self, principal: Principal, key: str | None) -> str:
        session_id = new_session_id()
        if key is not None:
            session_id = str(uuid.uuid5(_NAMESPACE, f"model\n{principal.owner}\n{key}"))
        await self.catalog.ensure_session(session_of(session_id, principal))
        return session_id

    async def _unused(self, session_id: str) -> int:
        """Return the lowest number that no model of a session has."""
        runs = await self.catalog.runs_of_session(session_id)
        used = {int(run.id.rpartition(":")[2]) for run in runs}
        return next(index for index in range(len(used) + 1) if index not in used)


def session_of(session_id: str, principal: Principal, client: str = _CLIENT) -> Session:
    """Return the row of a session without an SDK."""
    return Session(
        id=session_id,
        owner=principal.owner,
        sdk_version=client,
        display_name=None,
        project_id=None,
        key_id=principal.key_id,
        tags=[],
        user_metadata={},
    )


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) >> 2
