"""Requests that were accepted while their session head was not ready, in the checkpoint store.

A submission that waits for a head is answered with a promise, as the SDK repeats a submission for
five minutes only, but polls for a promised result without a limit. Until a head has the request, it
is an object of its own, `deferred/<target>/<seq_id>`: the checksum of the rest, a line of JSON, and
the body as it was received. Any replica, and the next process, can deliver it
(`deliveries.Deliveries`). Requests are keyed by (target, seq_id), so a second delivery is harmless.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import orjson
import structlog

from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded
from tinkercloud_protocol.wire.future_responses import JSON

log = structlog.get_logger(__name__)

FOLDER = "deferred"
_MIN_BYTES = 4096
"""What a request counts at least: its object, and the poll that waits for its result."""
_CHECKSUM_BYTES = 9
_REASON_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Deferred:
    """One request for a head that is not ready."""

    target: str
    """The model or sampling session that the request was routed to."""
    seq_id: int
    owner: str
    """Owner of the caller's key."""
    path: str
    headers: Mapping[str, str]
    """Headers of the client that heads read."""
    extra: Mapping[str, str]
    """Headers of the server for the head (`routes`)."""
    body: bytes
    refusal: str | None = None
    """Why the head must reject the request at its position; None for a request to execute."""

    @property
    def key(self) -> str:
        """Key of the object."""
        return key_of(self.target, self.seq_id)

    @property
    def num_bytes(self) -> int:
        """What the request counts in its owner's limit."""
        return max(len(self.body), _MIN_BYTES)

    @property
    def is_in_sequence(self) -> bool:
        """Whether later requests wait for this one: those of a model do, samples do not."""
        return ":train:" in self.target

    def refused(self, reason: str) -> "Deferred":
        """Return what has the head reject the request at its position.

        Without it the model's sequence would have a gap.
        """
        place = {"model_id": self.target, "seq_id": self.seq_id}
        return replace(
            self,
            headers={"content-type": JSON},
            body=orjson.dumps(place),
            refusal=reason[:_REASON_CHARACTERS],
        )

    def encode(self) -> bytes:
        """Return the content of the object."""
        fields = asdict(self)
        content = orjson.dumps({k: v for k, v in fields.items() if k != "body"}) + b"\n" + self.body
        return b"%08x\n" % zlib.crc32(content) + content

    @classmethod
    def decode(cls, content: bytes) -> "Deferred":
        """Read the content of an object.

        Raises:
            InvalidRequest: it is damaged.
        """
        rest = content[_CHECKSUM_BYTES:]
        if content[:_CHECKSUM_BYTES] != b"%08x\n" % zlib.crc32(rest):
            raise InvalidRequest("a deferred request is damaged: its checksum differs")
        line, _, body = rest.partition(b"\n")
        return cls(**orjson.loads(line), body=body)


def key_of(target: str, seq_id: int) -> str:
    """Return the key of a request's object; keys of one target are in order of the numbers."""
    return f"{FOLDER}/{target}/{seq_id:020d}"


class DeferredRequests:
    """The deferred requests of all owners. Belongs to one event loop.

    Methods that access the store raise `Unavailable` if it fails.
    """

    def __init__(self, objects: ObjectStoreClient) -> None:
        self._objects = objects
        self._sizes: dict[str, tuple[str, int]] = {}
        """Owner and size of the requests that this process has stored, by key."""
        self._bytes: Counter[str] = Counter()
        """Bytes of the requests that this process stores or has stored, by owner."""

    @contextmanager
    def room(self, owner: str, num_bytes: int, limit: int) -> Iterator[None]:
        """Reserve bytes for a request while it is received and stored.

        Args:
            owner: owner of the caller's key.
            num_bytes: size of the request's body, or its maximum if that is unknown.
            limit: maximum bytes of the deferred requests of one owner in this process.

        Raises:
            Overloaded: the owner has no room for it.
        """
        used = self._bytes[owner]
        if used + num_bytes > limit:
            raise Overloaded(
                f"{used} bytes of requests of owner {owner!r} wait for session heads that are not"
                f" ready, and this one has up to {num_bytes} (limits.max_queued_bytes is {limit});"
                " send it again later"
            )
        self._bytes[owner] += num_bytes
        try:
            yield
        finally:
            self._bytes[owner] -= num_bytes

    async def add(self, request: Deferred) -> None:
        """Store a request; one that is stored already is left as it is.

        Raises:
            InvalidRequest: its sequence number belongs to a request with other content.
        """
        encoded = await asyncio.to_thread(request.encode)
        if not await self._objects.create(request.key, encoded):
            stored = await self._read(request.key)
            if stored is None:
                # It was damaged, or has just been delivered, and a second delivery is harmless.
                await self._objects.create(request.key, encoded)
            elif stored.body != request.body:
                raise InvalidRequest(
                    f"seq_id: {request.seq_id} was already used for another request; use the next"
                    " unused number"
                )
        if request.key not in self._sizes:
            self._sizes[request.key] = (request.owner, request.num_bytes)
            self._bytes[request.owner] += request.num_bytes

    async def has_any(self, target: str) -> bool:
        """Return whether a target has requests."""
        return bool(await self._keys(target))

    async def of_target(self, target: str) -> AsyncIterator[Deferred]:
        """Read the requests of a target one by one, in their order; damaged ones are deleted."""
        for key in await self._keys(target):
            if (request := await self._read(key)) is not None:
                yield request

    async def _keys(self, target: str) -> list[str]:
        """Return the keys of a target's requests in their order."""
        folder = f"{FOLDER}/{target}/"
        counted = [key for key in self._sizes if key.startswith(folder)]
        # A killed process may leave a file of another name (`ObjectStoreClient.create`).
        found = [key for key in await self._objects.keys(folder) if key[len(folder) :].isdecimal()]
        for key in set(counted).difference(found):
            # Another replica has delivered it.
            self._uncount(key)
        return sorted(found)

    async def _read(self, key: str) -> Deferred | None:
        """Read a request; None if it is missing or damaged, in which case it is deleted."""
        content = await self._objects.read(key)
        if content is None:
            return None
        try:
            return await asyncio.to_thread(Deferred.decode, content)
        except InvalidRequest as error:
            log.error("deleting a deferred request", key=key, reason=error.message)  # noqa: TRY400 - nothing is wrong here
            await self._remove(key)
            return None

    async def targets(self) -> Sequence[str]:
        """Return the models and sampling sessions that have deferred requests."""
        return await self._objects.folders(f"{FOLDER}/")

    async def refuse(self, target: str, seq_id: int, reason: str) -> None:
        """Have the head reject a request at its position, instead of executing it.

        A missing request is not an error. A sample, for which no other request waits, is deleted.
        """
        key = key_of(target, seq_id)
        request = await self._read(key)
        if request is None or request.refusal is not None:
            return
        if request.is_in_sequence:
            await self._objects.replace(key, request.refused(reason).encode())
        else:
            await self._remove(key)

    async def remove(self, target: str, seq_id: int) -> None:
        """Delete a request. A missing one is not an error."""
        await self._remove(key_of(target, seq_id))

    async def remove_all(self, target: str) -> None:
        """Delete the requests of a target."""
        for key in await self._objects.keys(f"{FOLDER}/{target}/"):
            await self._remove(key)

    async def _remove(self, key: str) -> None:
        await self._objects.delete(key)
        self._uncount(key)

    def _uncount(self, key: str) -> None:
        if (size := self._sizes.pop(key, None)) is not None:
            owner, num_bytes = size
            self._bytes[owner] -= num_bytes
