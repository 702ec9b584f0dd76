"""The copy of a run's journal in the object store, from which a head on any machine continues it.

Below the folder `journals` of the checkpoint store, `runs/<run id>/` has

    journal/<number>                  objects of the journal, without gaps since the newest base
    suspended/<prefix>/<file>         files of its snapshots, named as those of suspended states

An object is created only if no object of its number exists. That is the fence: a head that takes
over creates the next object, so the object that an earlier head would write next exists already,
and that head stops. It stays until the journal is deleted, so that the earlier head stops however
late it writes; other objects are deleted once a newer base replaces them. Objects are never
changed. An object is

    length    4 bytes   of the header, little-endian
    checksum  4 bytes   CRC-32 of the header
    header              a `Header` as JSON
    records             of the journal (`tinkercloud_worker.journal.records`), possibly none

The state of a run is the newest `Base` of all objects, and the records that follow it.
"""

import re
import struct
import zlib
from collections.abc import Iterable

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest, check_version
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import describe
from tinkercloud_protocol.wire.paths import run_prefix

FOLDER = "journals"
"""Folder of all shared journals in the checkpoint store."""
HEADER_LIMIT = 1 << 20
"""Bytes at the start of an object that certainly have its header."""

_FIELDS = struct.Struct("<II")
_NAME = re.compile(r"[0-9]{10}")


class Base(BaseModel):
    """What the records of a journal follow."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    snapshot: SuspendedManifest | None
    """The state; None if it is the creation of the model."""
    first_index: int
    """Index of the first record that may not be part of the state."""


class Header(BaseModel):
    """What an object of a shared journal says about itself."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    manifest: JournalManifest
    """Its last generation is that of the head that wrote the object."""
    start_index: int
    """Index of the object's first record, or of the next record if it has none."""
    next_index: int
    """Index of the record after its last one."""
    base: Base | None = None
    """Replaces the bases of earlier objects."""
    fences: tuple[int, ...] = ()
    """Numbers of the objects, up to this one, with which heads took over from others."""
    is_behind: bool = False
    """Whether the head that took over with this object has state that the journal up to here lacks.
    Its own records may then have indexes of earlier ones. An object with a base ends this."""

    def continues(self, generation: str) -> bool:
        """Return whether the journal has the state of the run in the head of that generation."""
        return generation in self.manifest.generations


def encode(header: Header, records: bytes) -> bytes:
    """Return the content of an object."""
    described = header.model_dump_json().encode()
    fields = _FIELDS.pack(len(described), zlib.crc32(described))
    return b"".join([fields, described, records])


def decode(content: bytes | memoryview, name: str) -> tuple[Header, memoryview]:
    """Return the header and the records of an object, or of its first `HEADER_LIMIT` bytes.

    Args:
        content: the content.
        name: its name in error messages.

    Raises:
        InvalidRequest: the header is damaged, or a newer release wrote it.
    """
    if len(content) < _FIELDS.size:
        raise InvalidRequest(f"{name} is damaged: it has {len(content)} bytes, and no header")
    length, checksum = _FIELDS.unpack_from(content)
    described = bytes(content[_FIELDS.size : _FIELDS.size + length])
    if len(described) < length or zlib.crc32(described) != checksum:
        raise InvalidRequest(f"{name} is damaged: its header differs from its checksum")
    fields = orjson.loads(described)
    check_version(JournalManifest, fields.get("manifest"), name)
    check_version(SuspendedManifest, (fields.get("base") or {}).get("snapshot"), name)
    try:
        header = Header.model_validate_json(described)
    except ValidationError as error:
        raise InvalidRequest(
            f"{name} is damaged: its header is incomplete ({describe(error)})"
        ) from None
    return header, memoryview(content)[_FIELDS.size + length :]


def objects_folder(run_id: str) -> str:
    """Return the folder of a run's objects, below `FOLDER`, without a slash at either end."""
    return f"{run_prefix(run_id)}/journal"


def object_key(run_id: str, number: int) -> str:
    """Return the key of an object, below `FOLDER`."""
    return f"{objects_folder(run_id)}/{number:010d}"


def numbers(keys: Iterable[str]) -> list[int]:
    """Return the numbers of the objects among these keys, in order."""
    names = (key.rpartition("/")[2] for key in keys)
    return sorted(int(name) for name in names if _NAME.fullmatch(name))


def name_of(run_id: str, number: int) -> str:
    """Return the name of an object in error messages."""
    return f"object {number} of the journal of training run {run_id} in the checkpoint store"
