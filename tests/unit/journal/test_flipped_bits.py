"""One changed bit in a file that is read back is refused by name, or changes no value.

`FLIPS=all` tries every bit of every byte; otherwise one bit of each byte is tried.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from obstore.store import LocalStore

from tinkercloud_api.providers.base import HeadFailed
from tinkercloud_api.providers.local import head_folder
from tinkercloud_protocol.heads import journal_copy, journal_files
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    ImportedAdapter,
    StoredFile,
    SuspendedManifest,
    decode_manifest,
    encode_manifest,
)
from tinkercloud_protocol.heads.journal_copy import Base, Header
from tinkercloud_protocol.heads.journal_files import JournalManifest, manifest_path
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.losses import traced_losses
from tinkercloud_protocol.losses.traced_losses import CustomLossId
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_testing.training.uploaded_losses import of_nodes
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.journal import records
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.records import Entry, Record

RUN = "s:train:0"
SPEC = ModelSpec(owner="anna", lora=LoraConfig(rank=8, seed=7, train_mlp=False))
JOURNAL = JournalManifest(
    run_id=RUN,
    generations=["g1", "g2"],
    base_model="tiny",
    base_fingerprint="0123-4567",
    spec=SPEC,
    initial_seed=7,
)
FILES = {"adapter_model.safetensors": StoredFile(size_bytes=9, sha256="0" * 64)}
MOMENT = datetime(2026, 11, 28, tzinfo=UTC)
CHECKPOINT = CheckpointManifest(
    tinker_path=f"tinker://{RUN}/weights/a",
    owner="anna",
    base_model="tiny",
    lora=SPEC.lora,
    step=3,
    created_at=MOMENT,
    expires_at=MOMENT,
    imported=ImportedAdapter(scale=0.25),
    files=FILES,
)
SUSPENDED = SuspendedManifest(
    run_id=RUN,
    generation="g2",
    continues=["g1"],
    owner="anna",
    base_model="tiny",
    lora=SPEC.lora,
    created_at=MOMENT,
    data_prefix="a",
    files=FILES,
)
LOSS = of_nodes(
    {
        "op": "call_function",
        "name": "scaled",
        "target": "operator.mul",
        "args": [{"ref": "logprobs"}, 2.5],
    }
)
LOSS_ID = CustomLossId("s", 0)
ENTRY = Entry(seq_id=3, path="/optim_step", role="step", digest="00ff", size=9, read=("a", "b"))
# A last record that differs and ends with a zero looks like one that was not completely written.
RECORDS = [Record(0, ENTRY, b"body\1"), Record(1, ENTRY, b"\0\1"), Record(2, ENTRY, b"end\3")]
HEADER = Header(
    manifest=JOURNAL, start_index=0, next_index=3, base=Base(snapshot=SUSPENDED, first_index=0)
)


@dataclass(frozen=True)
class Kind:
    """A kind of file: its content, and how it is read."""

    content: bytes
    read: Callable[[bytes], object]


def read_journal_manifest(folder: Path) -> Kind:
    JournalFolder(folder, RUN).write_manifest(JOURNAL)
    path = manifest_path(folder, RUN)

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return journal_files.read_manifest(folder, RUN)

    return Kind(path.read_bytes(), read)


def read_deaths(folder: Path) -> Kind:
    journal = JournalFolder(folder, RUN)
    journal.write_manifest(JOURNAL)
    journal.write_deaths({12: 1, 3: 2})
    path = manifest_path(folder, RUN).with_name("deaths.json")

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return journal.deaths() or refuse()

    return Kind(path.read_bytes(), read)


def refuse() -> object:
    """Say that a damaged file was noticed; no deaths are known then."""
    raise InvalidRequest("deaths.json is ignored")


def read_segment(folder: Path) -> Kind:
    journal = JournalFolder(folder, RUN)
    segment = journal.create(1)
    segment.write(b"".join(map(records.encode, RECORDS)))
    segment.close()
    [path] = folder.rglob("*.log")

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return journal.read()

    return Kind(path.read_bytes(), read)


def read_shared_object(folder: Path) -> Kind:
    def read(content: bytes) -> object:
        header, rest = journal_copy.decode(content, "object 1")
        return header, records.decode(rest, "object 1")

    return Kind(
        journal_copy.encode(HEADER, b"".join(map(records.encode, RECORDS))),
        read,
    )


def read_lock(folder: Path) -> Kind:
    def read(content: bytes) -> object:
        try:
            return head_folder._pid_in(content.decode(errors="replace"), folder)
        except HeadFailed as error:
            raise InvalidRequest(str(error)) from None

    return Kind(head_folder.lock_content(4321).encode(), read)


KINDS: dict[str, Callable[[Path], Kind]] = {
    "manifest of a journal": read_journal_manifest,
    "deaths.json": read_deaths,
    "lock of a local head": read_lock,
    "uploaded loss": lambda _: Kind(
        traced_losses.encode(LOSS), lambda content: traced_losses.read(content, LOSS_ID)
    ),
    "segment of a journal": read_segment,
    "object of a shared journal": read_shared_object,
    "manifest of a checkpoint": lambda _: Kind(
        encode_manifest(CHECKPOINT),
        lambda content: decode_manifest(CheckpointManifest, content, "it"),
    ),
    "manifest of a suspended state": lambda _: Kind(
        encode_manifest(SUSPENDED),
        lambda content: decode_manifest(SuspendedManifest, content, "it"),
    ),
}


def flips(content: bytes) -> Iterator[bytes]:
    for place in range(len(content)):
        for bit in range(8) if os.environ.get("FLIPS") == "all" else [place % 8]:
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            yield bytes(changed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_bit_is_refused_or_changes_no_value(kind: str, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path)
    expected = file.read(file.content)
    refused = 0

    for content in flips(file.content):
        try:
            assert file.read(content) == expected
        except InvalidRequest:
            refused += 1

    # White space between the fields has no meaning.
    assert refused > 0.8 * len(file.content)


def test_every_changed_digit_of_a_seed_is_refused(tmp_path: Path) -> None:
    file = read_journal_manifest(tmp_path)
    assert b'"initial_seed": 7' in file.content

    with pytest.raises(InvalidRequest, match=r"can't be continued: its journal .* its checksum"):
        file.read(file.content.replace(b'"initial_seed": 7', b'"initial_seed": 6'))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "manifest" in kind])
def test_a_manifest_without_its_checksum_is_damaged(kind: str, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path)
    fields: dict[str, Any] = orjson.loads(file.content)
    del fields["checksum"]

    with pytest.raises(InvalidRequest, match="it lacks its checksum"):
        file.read(orjson.dumps(fields))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "manifest" in kind])
def test_a_manifest_of_a_newer_release_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path)
    fields: dict[str, Any] = orjson.loads(file.content)
    newer = {**fields, "format_version": fields["format_version"] + 1, "release": "9.0.0"}

    with pytest.raises(InvalidRequest) as refused:
        file.read(orjson.dumps(newer))

    assert re.search(
        rf"can't be read: its manifest\.json has version {newer['format_version']} \(of release"
        rf" 9\.0\.0\), and release 0\.1\.0 reads versions? .*; use release 9\.0\.0 or newer, or a"
        r" checkpoint or backup that this release wrote$",
        str(refused.value),
    )


def test_an_object_of_a_journal_of_a_newer_release_is_refused_in_a_sentence() -> None:
    newer = JOURNAL.model_copy(update={"format_version": 3})
    snapshot = SUSPENDED.model_copy(update={"format_version": 2})
    base = Base(snapshot=snapshot, first_index=0)
    headers = {
        "version 3": HEADER.model_copy(update={"manifest": newer}),
        "version 2": HEADER.model_copy(update={"base": base}),
    }

    for version, header in headers.items():
        with pytest.raises(InvalidRequest, match=f"object 1 can't be read: .* has {version}, and"):
            journal_copy.decode(journal_copy.encode(header, b""), "object 1")


async def test_every_changed_byte_of_a_file_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    contents = {"adapter_model.safetensors": bytes(range(64)), "trainer_state.json": b'{"step":3}'}
    store = CheckpointStore(LocalStore(tmp_path))
    path = CheckpointPath.parse(CHECKPOINT.tinker_path)
    manifest = await store.write(CHECKPOINT, contents, overwrite=False)

    for name, content in contents.items():
        file = tmp_path / manifest.key_of(name)
        for changed in flips(content):
            file.write_bytes(changed)
            with pytest.raises(InvalidRequest, match=f"its file {name} is damaged"):
                await store.read(path)
        file.write_bytes(content)

    _, found = await store.read(path)
    assert {name: bytes(content) for name, content in found.items()} == contents
    shutil.rmtree(tmp_path)
