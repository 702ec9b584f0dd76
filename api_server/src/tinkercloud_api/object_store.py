"""The object store as the server uses it: small objects, folders, and deleting both.

Whatever is wrong with the store (it is away, refuses the credentials, is too slow) is raised as
`Unavailable`: a request may be sent again, and a long poll is held. That an object is missing is no
error.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import obstore
import structlog
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore

from tinkercloud_protocol.errors import Unavailable

log = structlog.get_logger(__name__)

_PROBE = "health-probe"
_MISSING = (FileNotFoundError, NotFoundError)


class ObjectStoreClient:
    """Objects by their keys. Every method raises `Unavailable` if the store does not do it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def ping(self) -> None:
        """Return if the store answers."""
        with _translate_errors(), suppress(*_MISSING):
            await obstore.head_async(self._store, _PROBE)

    async def probe(self) -> None:
        """Return if the store can be written to: a full or read-only one answers all the same."""
        with _translate_errors():
            await obstore.put_async(self._store, _PROBE, b"written by health checks\n")

    async def upload(self, key: str, file: Path) -> None:
        """Store a local file's content as an object."""
        with _translate_errors():
            await obstore.put_async(self._store, key, file)

    async def read(self, key: str) -> bytes | None:
        """Return an object; None if there is none."""
        with _translate_errors(), suppress(*_MISSING):
            answer = await obstore.get_async(self._store, key)
            return bytes(await answer.bytes_async())
        return None

    async def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders in a folder, whose prefix ends with a slash."""
        with _translate_errors():
            listed = await obstore.list_with_delimiter_async(self._store, prefix)
            return [found.rstrip("/").rpartition("/")[2] for found in listed["common_prefixes"]]

    async def has_any(self, prefix: str) -> bool:
        """Return whether there is an object in a folder, whose prefix ends with a slash."""
        with _translate_errors():
            async for batch in obstore.list(self._store, prefix, chunk_size=1):
                return bool(batch)
        return False

    async def delete(self, key: str) -> None:
        """Delete an object. One that is missing is fine."""
        with _translate_errors(), suppress(*_MISSING):
            await obstore.delete_async(self._store, key)

    async def delete_folder(self, prefix: str) -> None:
        """Delete all objects in a folder, whose prefix has no slash at its end. None is fine."""
        with _translate_errors():
            # Somebody else may delete them too, and a folder of files then ends the call with the
            # first one that is missing: what is left is seen in the next round.
            while entries := await obstore.list(self._store, f"{prefix}/").collect_async():
                with suppress(*_MISSING):
                    await obstore.delete_async(self._store, [entry["path"] for entry in entries])


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        log.warning("the object store did not do what it was asked", error=str(error))
        raise Unavailable(
            "the object store of checkpoints does not answer, or refuses; send the request again"
        ) from error
