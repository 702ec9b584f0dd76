"""Reads and writes a run's journal in the object store; `protocol.shared_journals` has its format.

A head owns the journal from its first object on until another head creates one. Objects that a
newer base replaces are deleted, the oldest first, except those with which heads took over from
others: each has the number that the head before would write next.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import obstore
import structlog
from obstore.exceptions import AlreadyExistsError
from obstore.store import ObjectStore

from tinkercloud_protocol.heads import journal_copy
from tinkercloud_protocol.heads.journal_copy import Base, Header
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import run_prefix, suspended_prefix
from tinkercloud_worker.checkpoints import durable
from tinkercloud_worker.checkpoints.store import StoreFailed, store_errors
from tinkercloud_worker.journal import records
from tinkercloud_worker.journal.records import DamagedJournal, Record

if TYPE_CHECKING:
    from obstore import GetOptions

log = structlog.get_logger(__name__)

_SLOW_BYTES_PER_SECOND = 4e6
"""Speed of a store that is slow and still of use: large objects get more time."""
_DELETED_PER_SECOND = 20
"""The same for files that are deleted with one request, or with some."""


class Fenced(Exception):
    """Another head has taken over the journal."""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The end of a journal that its writer knows."""

    number: int
    """Number of the next object."""
    next_index: int
    """Index of the next record."""
    fences: tuple[int, ...] = ()
    """Numbers of the objects that are not deleted before the journal is."""
    is_behind: bool = False
    """See `Header.is_behind`."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What the state of a run in the object store begins and ends with."""

    header: Header
    """Header of the last object."""
    base: Base


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state of a run in the object store."""

    base: Base
    records: list[Record]
    """All records since the base, and possibly some before it."""


class SharedLog:
    """The objects of one run's journal."""

    def __init__(self, store: ObjectStore, run_id: str, timeout_seconds: float) -> None:
        """Create it.

        Args:
            store: the folder `journal_copy.FOLDER` of the checkpoint store.
            run_id: the run.
            timeout_seconds: time for one operation on an object.
        """
        self._store = store
        self.run_id = run_id
        self._timeout = timeout_seconds

    async def numbers(self) -> list[int]:
        """Return the numbers of all objects, in order."""
        return journal_copy.numbers(await self._keys(journal_copy.objects_folder(self.run_id)))

    async def last(self) -> tuple[int, Header] | None:
        """Return the number and the header of the last object; None if there is none."""
        numbers = await self.numbers()
        if not numbers:
            return None
        return numbers[-1], await self._header(numbers[-1])

    async def append(self, number: int, content: bytes) -> None:
        """Create the object of a number. May be repeated with the same content.

        Raises:
            Fenced: another head has created it.
            StoreFailed: it may or may not exist now.
        """
        key = journal_copy.object_key(self.run_id, number)
        try:
            async with asyncio.timeout(self._timeout + len(content) / _SLOW_BYTES_PER_SECOND):
                try:
                    with store_errors():
                        await durable.put_atomically(self._store, key, content, "create")
                except AlreadyExistsError:
                    # An earlier attempt may have succeeded without an answer.
                    if await self._content(number) != content:
                        raise Fenced from None
        except TimeoutError:
            raise self._slow() from None

    async def take_over(
        self,
        manifest: JournalManifest,
        base: Base | None,
        is_behind: Callable[[Header | None], bool] = lambda _: False,
    ) -> LogPlace:
        """Append an object without records, so that all earlier heads stop writing.

        Args:
            manifest: of the journal; its last generation is this head's.
            base: what the records of this head follow; None to continue the journal as it is. Then
                nothing is appended if there is no journal.
            is_behind: whether the journal lacks something that this head has, given the header of
                its last object.

        Raises:
            Fenced: a head that the manifest does not name has taken over already.
        """
        numbers = await self.numbers()
        if not numbers and base is None:
            return LogPlace(1, 0, is_behind=is_behind(None))
        number, header = 0, None
        if numbers:
            number, header = numbers[-1], await self._header_if_readable(numbers[-1])
        # Which of the objects are fences is unknown if the last one can't be read.
        kept = tuple(numbers) if header is None else header.fences
        while True:
            if header is not None and header.manifest.generations[-1] not in manifest.generations:
                raise Fenced
            index = base.first_index if base is not None else header.next_index if header else 0
            fences = (*kept, number + 1) if number else ()
            new = Header(
                manifest=manifest,
                start_index=index,
                next_index=index,
                base=base,
                fences=fences,
                is_behind=base is None and is_behind(header),
            )
            try:
                await self.append(number + 1, journal_copy.encode(new, b""))
            except Fenced:
                # The earlier head wrote meanwhile.
                number, header = number + 1, await self._header_if_readable(number + 1)
                kept = header.fences if header is not None else (*kept, number)
            else:
                return LogPlace(number + 2, index, fences, new.is_behind)

    async def read(self) -> SharedState | None:
        """Return the state of the run; None if there is no journal.

        Raises:
            DamagedJournal: an object is damaged or missing.
        """
        found: list[list[Record]] = []
        ends = await self._read_back(found.append)
        if ends is None:
            return None
        return SharedState(ends.base, [record for each in reversed(found) for record in each])

    async def check(self) -> Ends | None:
        """Check the state of the run, as `read` does, with one object in memory at a time."""
        return await self._read_back(lambda _: None)

    async def _read_back(self, use: Callable[[list[Record]], object]) -> Ends | None:
        """Read the state of the run from its end; call `use` with the records of each object."""
        numbers = await self.numbers()
        base: Base | None = None
        header: Header | None = None
        later: tuple[str, list[Record]] = ("", [])
        for number in reversed(numbers):
            each, content = await self._read(number)
            header, base = header or each, base or each.base
            name = journal_copy.name_of(self.run_id, number)
            decoded = await asyncio.to_thread(_records, content, each, name, later)
            use(decoded)
            if decoded:
                later = name, decoded[:1]
            if base is not None and each.start_index <= base.first_index:
                return Ends(header, base)
        if header is None:
            return None
        missing = journal_copy.name_of(self.run_id, numbers[0] - 1)
        raise DamagedJournal(f"{missing} is missing, and later ones need it")

    async def remove(self, numbers: Collection[int]) -> None:
        """Delete objects, the oldest first."""
        for number in sorted(numbers):
            await self._delete([journal_copy.object_key(self.run_id, number)])

    async def snapshot_keys(self) -> list[str]:
        """Return the keys of the files of all snapshots, incomplete ones included."""
        return await self._keys(suspended_prefix(self.run_id))

    async def remove_files(self, keys: list[str]) -> None:
        """Delete files of snapshots."""
        await self._delete(keys)

    async def delete(self, owner: str | None = None) -> None:
        """Delete everything that there is of the run now. Idempotent.

        What another head writes meanwhile stays.

        Args:
            owner: generation of a head; nothing is deleted if another one wrote the last object.
        """
        keys = await self._keys(run_prefix(self.run_id))
        folder = journal_copy.objects_folder(self.run_id)
        numbers = journal_copy.numbers(k for k in keys if k.startswith(f"{folder}/"))
        if numbers and owner is not None:
            header = await self._header(numbers[-1])
            if header.manifest.generations[-1] != owner:
                return
        objects = [journal_copy.object_key(self.run_id, number) for number in numbers]
        files = sorted(set(keys).difference(objects))
        if not await self._delete_at_once([*objects, *files]):
            await self._delete([*objects, *files])

    async def _keys(self, prefix: str) -> list[str]:
        try:
            async with asyncio.timeout(self._timeout):
                with store_errors():
                    entries = await obstore.list(self._store, f"{prefix}/").collect_async()
        except TimeoutError:
            raise self._slow() from None
        except FileNotFoundError:
            # A file of a local store was deleted while its folder was listed.
            return await self._keys(prefix)
        return [entry["path"] for entry in entries]

    async def _delete_at_once(self, keys: list[str]) -> bool:
        """Delete files with few requests; return whether all of them existed."""
        try:
            async with asyncio.timeout(self._timeout + len(keys) / _DELETED_PER_SECOND):
                with store_errors():
                    await obstore.delete_async(self._store, keys)
        except FileNotFoundError:
            return False
        except TimeoutError:
            raise self._slow() from None
        return True

    async def _delete(self, keys: list[str]) -> None:
        for key in keys:
            try:
                async with asyncio.timeout(self._timeout):
                    with store_errors():
                        await obstore.delete_async(self._store, key)
            except FileNotFoundError:
                continue
            except TimeoutError:
                raise self._slow() from None

    async def _read(self, number: int) -> tuple[Header, memoryview]:
        name = journal_copy.name_of(self.run_id, number)
        return journal_copy.decode(await self._content(number), name)

    async def _header(self, number: int) -> Header:
        try:
            async with asyncio.timeout(self._timeout):
                start = await self._content(number, journal_copy.HEADER_LIMIT)
        except TimeoutError:
            raise self._slow() from None
        return journal_copy.decode(start, journal_copy.name_of(self.run_id, number))[0]

    async def _header_if_readable(self, number: int) -> Header | None:
        try:
            return await self._header(number)
        except InvalidRequest as error:
            log.warning("a copied journal can't be read", run_id=self.run_id, reason=error.message)
            return None

    async def _content(self, number: int, limit: int | None = None) -> memoryview:
        """Return an object, or its first bytes."""
        key = journal_copy.object_key(self.run_id, number)
        options: GetOptions = {"range": (0, limit)} if limit is not None else {}
        try:
            with store_errors():
                answer = await obstore.get_async(self._store, key, options=options)
                return memoryview(await answer.bytes_async())
        except FileNotFoundError:
            name = journal_copy.name_of(self.run_id, number)
            raise DamagedJournal(f"{name} is missing") from None

    def _slow(self) -> StoreFailed:
        return StoreFailed(f"the checkpoint store did not respond within {self._timeout:g} s")


def _records(
    content: memoryview, header: Header, name: str, later: tuple[str, list[Record]]
) -> list[Record]:
    """Return the records of an object.

    Args:
        content: what follows its header.
        header: its header.
        name: its name in error messages.
        later: the first of the records that follow, with the name of their object.

    Raises:
        DamagedJournal: records are damaged or missing.
    """
    found, size = records.decode(content, name)
    if size < len(content) or len(found) != header.next_index - header.start_index:
        raise DamagedJournal(f"{name} is damaged: its last records are missing")
    records.join([(name, found), later])
    return found
