"""Weights of unnamed sampler versions that a head has no room for: adapters in the store.

They stay there, in the folder of their run, until they are too many, their session is deleted, or
their run is. The state of a suspended run names them, so that the next head finds them. The space
is the head's, not its owners': it counts towards no quota, and is divided among those who need it.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterable

import structlog

from tinkercloud_protocol.heads.launch import Limits
from tinkercloud_protocol.wire.errors import NotFound, WireError
from tinkercloud_protocol.wire.paths import evicted_prefix
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.checkpoints.suspended import EvictedSampler
from tinkercloud_worker.engine.trainer import WeightsCopy

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
        """By session; without those that have been forgotten since."""
        self._writes: set[asyncio.Task[None]] = set()
        """All that run."""
        self._began = 0.0
        """Monotonic time at which the last write began."""

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever stored."""
        return self._max_bytes == 0

    @property
    def is_writing(self) -> bool:
        """Whether weights are being written."""
        return bool(self._writes)

    def __contains__(self, session: str) -> bool:
        return session in self._stored or session in self._writing

    def find(self, sessions: Iterable[str]) -> list[EvictedSampler]:
        """Return where the weights of sessions are that are stored by now."""
        return [self._stored[each] for each in sessions if each in self._stored]

    async def ready(self) -> bool:
        """Wait until nothing is being written; return whether that was so within a time limit.

        The limit is one for each write: an unreachable store must not delay every publication.
        """
        left = self._began + _WRITE_SECONDS - time.monotonic()
        if self.is_writing and left > 0:
            await asyncio.wait(set(self._writes), timeout=left)
        return not self.is_writing

    def begin(self, session: str, run_id: str, owner: str, weights: WeightsCopy) -> None:
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
        self._writes.add(task)
        task.add_done_callback(lambda _: self._ended(session, task))

    def _ended(self, session: str, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if self._writing.get(session) is task:
            del self._writing[session]

    async def _write(self, session: str, run_id: str, owner: str, weights: WeightsCopy) -> None:
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
            if self._writing.get(session) is not asyncio.current_task():
                # They were forgotten meanwhile: no state names them.
                await self._delete(stored)
                return
            self.add(stored, owner)
            await self._delete_surplus()
        except WireError as error:
            log.warning("evicted weights were not stored", session=session, reason=error.message)

    async def _delete_surplus(self) -> None:
        while (sizes := self.sizes()).total() > self._max_bytes:
            ((largest, _),) = sizes.most_common(1)
            first = next(each for each in self._stored if self._owners[each] == largest)
            if (stored := self._drop(first)) is not None:
                await self._delete(stored)

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

    async def read(self, session: str) -> WeightsCopy:
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
        return WeightsCopy(stored.lora, tensors)

    async def remove(self, session: str) -> None:
        """Delete the weights of a session, which may be unknown."""
        if (task := self._writing.get(session)) is not None:
            await asyncio.wait({task})
        if (stored := self._drop(session)) is not None:
            await self._delete(stored)

    async def _delete(self, stored: EvictedSampler) -> None:
        try:
            await self._store.delete_evicted(stored)
        except WireError as error:
            # It is deleted with its run.
            reason = error.message
            log.warning("evicted weights were not deleted", session=stored.session, reason=reason)

    def forget(self, session: str) -> None:
        """Forget the weights of a session, which another head continues.

        They stay stored; those that are still being written are deleted.
        """
        self._drop(session)
        self._writing.pop(session, None)

    def _drop(self, session: str) -> EvictedSampler | None:
        self._owners.pop(session, None)
        return self._stored.pop(session, None)


def unknown(session: str) -> NotFound:
    """Return the error that reports a sampling session that is unknown."""
    return NotFound(
        f"sampling session {session!r} is unknown: it was deleted, or its unnamed"
        " version was too old to be saved when the run was suspended; save the"
        " weights again"
    )


def gone(session: str, limits: Limits) -> NotFound:
    """Return the error that reports a sampling session whose evicted weights are not stored."""
    return NotFound(
        f"the weights of sampling session {session!r} were evicted: all unnamed versions"
        f" together may use limits.max_snapshot_bytes ({limits.max_snapshot_bytes}), and evicted"
        " adapters limits.max_stored_snapshot_bytes of the checkpoint store"
        f" ({limits.max_stored_snapshot_bytes}). To keep weights, save"
        " them under a name: save_weights_for_sampler(name), then"
        " create_sampling_client(model_path=...)"
    )
