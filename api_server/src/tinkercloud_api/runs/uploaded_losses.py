"""Losses that clients upload for a session: checked here, stored for the session heads.

A loss is written once, under the number that its client gave it, and deleted with its session.
"""

import asyncio
from dataclasses import dataclass

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_protocol.losses import traced_losses
from tinkercloud_protocol.losses.traced_losses import (
    CreateCustomLossRequest,
    CustomLossId,
)
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_protocol.wire.future_responses import Result


@dataclass(frozen=True, slots=True)
class CustomLosses:
    """Stores the losses of sessions."""

    objects: ObjectStoreClient
    training_runs: TrainingRuns

    async def create(self, request: CreateCustomLossRequest, principal: Principal) -> str:
        """Store a loss; return its id. A repeated request is the same loss.

        Raises:
            NotFound: the session does not exist for this principal.
            InvalidRequest: the session has ended, the loss is not allowed, or its number was used
                for another one.
        """
        await self.training_runs.active_session(request.session_id, principal)
        await asyncio.to_thread(traced_losses.check, request)
        loss_id = CustomLossId(request.session_id, request.custom_loss_seq_id)
        content = traced_losses.encode(request)
        is_new = await self.objects.create(loss_id.key, content)
        if not is_new and await self.objects.read(loss_id.key) != content:
            raise InvalidRequest(
                f"custom_loss_seq_id: {request.custom_loss_seq_id} was already used in this"
                " session for another loss; use the next unused number"
            )
        return str(loss_id)

    async def result(self, loss_id: CustomLossId, principal: Principal) -> Result:
        """Return the result of the request that created a loss.

        Raises:
            NotFound: the loss does not exist for this principal.
        """
        what = f"custom loss {str(loss_id)!r}"
        principal.require(await self.training_runs.catalog.session(loss_id.session_id), what)
        if await self.objects.read(loss_id.key) is None:
            raise NotFound(f"{what} does not exist; create it with create_custom_loss")
        return future_responses.finished({"loss_id": str(loss_id), "type": "create_custom_loss"})

    async def delete(self, session_id: str) -> None:
        """Delete the losses of a session that has ended."""
        await self.objects.delete_folder(traced_losses.folder_of(session_id))
