"""Weights of unnamed snapshots that a head has no room for: adapters, in the checkpoint store.

They stay there, in the folder of their run, until they are too many, their session is deleted, or
their run is. The state of a suspended run names them, so that the next head finds them. The space
is the head's, not its owners': it counts towards no quota, and is divided among those who need it.
"""

import asyncio
import time
import uuid
from collections import Counter

import structlog

from tinkercloud_protocol.errors import NotFound, WireError
from tinkercloud_protocol.paths import evicted_prefix
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.checkpoints.suspended import EvictedSampler
from tinkercloud_worker.engine.trainer import WeightsSnapshot

log = structlog.get_logger(__name__)

_WRITE_SECONDS = 30.0
"""How long the next weights wait while some are being written. Then they are not stored."""


class EvictedWeights:
    """The evicted weights of a head that are, or are being, stored. Belongs to one event loop.

    They are written in the background, one after the other, so that at most one is in memory.
    """

    def __init__(self, store: CheckpointStore, max_bytes: int) -> None:
        """Start empty.

        Args:
            store: where to write.
            max_bytes: total size; beyond it, the owner with the most loses those that were evicted
                first.
        """
        self._store = store
        self._max_bytes = max_bytes
        self._stored: dict[str, EvictedSampler] = {}
        """By sampling session, the first to be evicted first."""
        self._owners: dict[str, str] = {}
        """By sampling session."""
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._began = 0.0
        """Monotonic time at which the last write began."""

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever stored."""
        return self._max_bytes == 0

    def __contains__(self, session: str) -> bool:
        return session in self._stored or session in self._writing

    def find(self, session: str) -> EvictedSampler | None:
        """Return where the weights of a session are; None if they are not, or not yet, stored."""
        return self._stored.get(session)

    async def ready(self) -> bool:
        """Wait until nothing is being written; return whether that was so within a time limit.

        The limit is one for each write: an unreachable store must not delay every publication.
        """
        left = self._began + _WRITE_SECONDS - time.monotonic()
        if self._writing and left > 0:
            await asyncio.wait(set(self._writing.values()), timeout=left)
        return not self._writing

    def begin(self, session: str, run_id: str, owner: str, weights: WeightsSnapshot) -> None:
        """Write the weights of a session in the background. A failure is logged: they are lost.

        Args:
            session: the session, whose weights are not stored.
            run_id: the run that they are of.
            owner: the owner of that run.
            weights: an adapter.
        """
        self._began = time.monotonic()
        task = asyncio.create_task(self._write(session, run_id, owner, weights))
        self._writing[session] = task
        task.add_done_callback(lambda _: self._writing.pop(session, None))

    async def _write(self, session: str, run_id: str, owner: str, weights: WeightsSnapshot) -> None:
        assert weights.lora is not None  # noqa: S101 - it is an adapter
        name = f"{evicted_prefix(run_id)}/{uuid.uuid4().hex}.safetensors"
        try:
            content = await asyncio.to_thread(formats.encode_tensors, weights.tensors)
            if len(content) > self._max_bytes:
                return
            file = await self._store.put_evicted(name, content)
            stored = EvictedSampler(
                session=session, lora=weights.lora, key=name, **file.model_dump()
            )
            self.add(stored, owner)
            await self._delete_surplus()
        except WireError as error:
            log.warning("evicted weights were not stored", session=session, reason=error.message)

    async def _delete_surplus(self) -> None:
        while (sizes := self.sizes()).total() > self._max_bytes:
            ((largest, _),) = sizes.most_common(1)
            await self._delete(next(each for each in self._stored if self._owners[each] == largest))

    def sizes(self) -> Counter[str]:
        """Return the stored bytes of each owner."""
        sizes = Counter[str]()
        for session, stored in self._stored.items():
            sizes[self._owners[session]] += stored.size_bytes
        return sizes

    def add(self, stored: EvictedSampler, owner: str) -> None:
        """Add weights that are stored, such as those that another head has written."""
        self._stored[stored.session] = stored
        self._owners[stored.session] = owner

    async def read(self, session: str) -> WeightsSnapshot:
        """Return the weights of a session.

        Raises:
            NotFound: they are not stored, or not any more.
            InvalidRequest: they are damaged.
        """
        if (task := self._writing.get(session)) is not None:
            await asyncio.wait({task})
        stored = self._stored.get(session)
        content = await self._store.read_evicted(stored) if stored is not None else None
        if stored is None or content is None:
            self._drop(session)
            raise NotFound(f"the weights of sampling session {session!r} are not stored")
        tensors = await asyncio.to_thread(formats.decode_stored, stored.key, content)
        return WeightsSnapshot(stored.lora, tensors)

    async def remove(self, session: str) -> None:
        """Delete the weights of a session, which may be unknown."""
        if (task := self._writing.get(session)) is not None:
            await asyncio.wait({task})
        if session in self._stored:
            await self._delete(session)

    async def _delete(self, session: str) -> None:
        stored = self._stored[session]
        self._drop(session)
        try:
            await self._store.delete_evicted(stored)
        except WireError as error:
            # It is deleted with its run.
            log.warning("evicted weights were not deleted", session=session, reason=error.message)

    def forget(self, session: str) -> None:
        """Forget the weights of a session, which another head continues; they stay stored."""
        self._drop(session)

    def _drop(self, session: str) -> None:
        self._stored.pop(session, None)
        self._owners.pop(session, None)
