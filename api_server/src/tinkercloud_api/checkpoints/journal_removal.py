"""The copies of runs' journals in the checkpoint store (`protocol.shared_journals`)."""

from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_protocol.heads.journal_copy import (
    FOLDER,
    HEADER_LIMIT,
    decode,
    name_of,
    numbers,
    object_key,
    objects_folder,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import run_prefix


class SharedJournals:
    """Finds and deletes copied journals."""

    def __init__(self, objects: ObjectStoreClient) -> None:
        self._objects = objects

    async def has(self, run_id: str, generation: str) -> bool:
        """Whether a copy has the state of a run in the head of a generation.

        Raises:
            Unavailable: the store does not respond.
        """
        found = numbers(await self._objects.keys(f"{FOLDER}/{objects_folder(run_id)}/"))
        if not found:
            return False
        start = await self._objects.read_start(
            f"{FOLDER}/{object_key(run_id, found[-1])}", HEADER_LIMIT
        )
        try:
            header, _ = decode(start or b"", name_of(run_id, found[-1]))
        except InvalidRequest:
            # A head reads it too, and says what is wrong with it.
            return True
        return header.continues(generation)

    async def delete(self, run_id: str) -> None:
        """Delete a copy. A missing one is not an error."""
        await self._objects.delete_folder(f"{FOLDER}/{run_prefix(run_id)}")
