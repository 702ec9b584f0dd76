"""The uploaded losses of a session, which a head reads from the object store when it needs them."""

import asyncio
from collections.abc import Mapping

from tinkercloud_protocol.losses import traced_losses
from tinkercloud_protocol.losses.traced_losses import CustomLossId
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.custom_losses.graphs import compiled


class SessionLosses:
    """Finds the losses that a session has uploaded. They never change."""

    def __init__(self, session_id: str, store: CheckpointStore) -> None:
        """Find the losses of a session in a store."""
        self._session_id = session_id
        self._store = store
        self._known: dict[CustomLossId, bytes] = {}

    async def definition(self, config: Mapping[str, float | str]) -> bytes:
        """Return the definition of the loss that a request names.

        Args:
            config: the request's loss_fn_config.

        Raises:
            InvalidRequest: it names no loss of this session, or one that is damaged or not allowed
                any more.
        """
        name = config.get("loss_id")
        if not isinstance(name, str) or len(config) > 1:
            raise InvalidRequest(
                "loss_fn_config: loss_fn 'custom' takes one setting, 'loss_id', the text that"
                " create_custom_loss has returned"
            )
        loss_id = CustomLossId.parse(name)
        if (known := self._known.get(loss_id)) is not None:
            return known
        is_own = loss_id.session_id == self._session_id
        found = await self._store.read_small(loss_id.key) if is_own else None
        if found is None:
            raise InvalidRequest(
                f"loss_fn_config['loss_id']: session {self._session_id!r} has no loss {name!r};"
                " create it with create_custom_loss in the session of the model"
            )
        definition = await asyncio.to_thread(_read, found, loss_id)
        self._known[loss_id] = definition
        return definition


def _read(content: bytes, loss_id: CustomLossId) -> bytes:
    """Check a stored loss, and compile it, which takes time only once; return its definition."""
    definition = traced_losses.read(content, loss_id)
    compiled(definition)
    return definition
