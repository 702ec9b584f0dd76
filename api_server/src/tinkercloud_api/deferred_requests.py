"""Requests that were accepted while their session head was not ready, in the checkpoint store.

A submission that waits for a head is answered with a promise, as the SDK repeats a submission for
five minutes only, but polls for a promised result without a limit. Until a head has the request, it
is an object of its own, `deferred/<target>/<seq_id>`: the checksum of the rest, a line of JSON, and
the body as it was received. Any replica, and the next process, can deliver it
(`deliveries.Deliveries`). Requests are keyed by (target, seq_id), so a second delivery is harmless.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import orjson
import structlog

from tinkercloud_api.object_store import ObjectStoreClient
from tinkercloud_protocol.errors import InvalidRequest, Overloaded

log = structlog.get_logger(__name__)

FOLDER = "deferred"
_MIN_BYTES = 4096
"""What a request counts at least: its object, and the poll that waits for its result."""
_CHECKSUM_BYTES = 9


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
        if not await self._objects.create(request.key, request.encode()):
            content = await self._objects.read(request.key)
            if content is not None and Deferred.decode(content).body != request.body:
                raise InvalidRequest(
                    f"seq_id: {request.seq_id} was already used for another request; use the next"
                    " unused number"
                )
        if request.key not in self._sizes:
            self._sizes[request.key] = (request.owner, request.num_bytes)
            self._bytes[request.owner] += request.num_bytes

    async def of_target(self, target: str) -> Sequence[Deferred]:
        """Return the requests of a target, in their order; damaged ones are deleted."""
        found = []
        for key in sorted(await self._objects.keys(f"{FOLDER}/{target}/")):
            content = await self._objects.read(key)
            if content is None:
                continue
            try:
                found.append(Deferred.decode(content))
            except InvalidRequest as error:
                log.error("deleting a deferred request", key=key, reason=error.message)  # noqa: TRY400 - nothing is wrong here
                await self._remove(key)
        return found

    async def targets(self) -> Sequence[str]:
        """Return the models and sampling sessions that have deferred requests."""
        return await self._objects.folders(f"{FOLDER}/")

    async def remove(self, target: str, seq_id: int) -> None:
        """Delete a request. A missing one is not an error."""
        await self._remove(key_of(target, seq_id))

    async def remove_all(self, target: str) -> None:
        """Delete the requests of a target."""
        for key in await self._objects.keys(f"{FOLDER}/{target}/"):
            await self._remove(key)

    async def _remove(self, key: str) -> None:
        await self._objects.delete(key)
        owner, num_bytes = self._sizes.pop(key, ("", 0))
        self._bytes[owner] -= num_bytes
