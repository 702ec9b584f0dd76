"""Backups of a state folder that changes while it is copied."""

import io
import shutil
import tarfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tinkercloud_api.admin.backup import archive, create, open_files, verify
from tinkercloud_api.admin.backup.archive import Manifest
from tinkercloud_api.catalog.backup import BackupError
from tinkercloud_api.catalog.schema.tables import Upload
from tinkercloud_api.config import server_settings
from tinkercloud_api.config.settings import Settings
from tinkercloud_protocol.heads.checkpoint_manifest import decode_manifest
from tinkercloud_protocol.heads.journal_copy import Base, Header, encode, object_key
from tinkercloud_testing.storage.backed_up import RUN, State, journal_manifest, now, stored
from tinkercloud_worker.journal import records
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.records import Entry, Record


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State.make(tmp_path / "state")


def nothing(_: int) -> None:
    """Do nothing with the bytes that were copied."""


def once(act: Callable[[], object]) -> Callable[[int], None]:
    """Return a progress that does something after the first bytes, when the catalog is copied."""
    has_acted = False

    def progress(_: int) -> None:
        nonlocal has_acted
        if not has_acted:
            has_acted = True
            act()

    return progress


def back_up(state: State, progress: Callable[[int], object] = nothing) -> tuple[Manifest, State]:
    """Back up everything; return the manifest, and what was unpacked from the backup."""
    folder = state.folder.parent
    workspace, unpacked = folder / "workspace", folder / "unpacked"
    for each in (workspace, unpacked):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir()
    output = io.BytesIO()
    source = create.sources(state.settings, checkpoints=True, journals=True)
    manifest = create.create(source, output, workspace, progress)
    output.seek(0)
    checked = folder / "checked"
    checked.mkdir(exist_ok=True)
    assert verify.verify(output, "it", checked, nothing) == manifest
    output.seek(0)
    with tarfile.open(fileobj=output) as tar:
        tar.extractall(unpacked, filter="data")
    return manifest, State(unpacked)


def test_a_backup_has_the_catalog_the_store_and_the_journals_but_no_logs(state: State) -> None:
    state.suspend(state.store, "p", b"suspended")
    state.put("losses/s/0.json", b"{}")
    state.put(f"runs/{RUN}/evicted/1.safetensors", b"evicted")
    state.put(f"runs/{RUN}/weights/unfinished/model.safetensors", b"x")
    manifest, copy = back_up(state)

    names = set(manifest.files)
    assert {
        "catalog.db",
        "version.json",
        "checkpoints/losses/s/0.json",
        f"checkpoints/runs/{RUN}/evicted/1.safetensors",
        f"checkpoints/runs/{RUN}/suspended/manifest.json",
        f"checkpoints/runs/{RUN}/suspended/p/head.json",
        f"checkpoints/runs/{RUN}/weights/one/manifest.json",
        f"checkpoints/runs/{RUN}/weights/one/model.safetensors",
        f"heads/m-1/journals/runs/{RUN}/journal/00000001.log",
        f"heads/m-1/journals/runs/{RUN}/journal/manifest.json",
    } <= names
    assert not [name for name in names if "unfinished" in name or name.endswith(".log.1")]
    assert "heads/m-1/head.log" not in names
    assert copy.listed() == state.listed()
    assert manifest.damaged == {}


def test_checkpoints_deleted_saved_and_overwritten_meanwhile_are_listed_as_they_were_copied(
    state: State,
) -> None:
    def change() -> None:
        state.delete("one")
        state.save("two", b"another" * 1000)
        state.save("three", b"new")

    manifest, copy = back_up(state, once(change))

    assert manifest.damaged == {}
    assert copy.listed() == state.listed()
    assert set(copy.listed()) == {"two", "three"}
    kept = copy.store / copy.path("two").prefix / "model.safetensors"
    assert kept.read_bytes() == b"another" * 1000


def test_a_checkpoint_that_is_overwritten_while_it_is_copied_is_the_old_or_the_new_one(
    state: State,
) -> None:
    source, progress_of = state.path("one"), [0]

    def progress(size: int) -> None:
        progress_of[0] += size
        if size and (state.store / source.prefix).exists():
            state.save("one", b"%d" % progress_of[0] * 500, is_listed=False)

    manifest, copy = back_up(state, progress)

    assert str(source) not in manifest.damaged
    content = (copy.store / source.prefix / "model.safetensors").read_bytes()
    described = manifest.files[f"checkpoints/{source.prefix}/model.safetensors"]
    assert stored(content) == described


def test_what_is_missing_or_damaged_already_is_named_and_the_rest_is_backed_up(
    state: State,
) -> None:
    (state.store / state.path("one").prefix / "model.safetensors").write_bytes(b"flipped")
    shutil.rmtree(state.store / state.path("two").prefix)
    manifest, _ = back_up(state)

    assert manifest.damaged == {
        str(state.path("one")): "its file model.safetensors differs from its manifest",
        str(state.path("two")): "it is not in the checkpoint store",
    }


def test_a_store_that_is_not_mounted_is_refused_before_anything_is_copied(state: State) -> None:
    shutil.move(state.store, state.folder / "away")
    copied: list[int] = []
    for has_mount_point in (False, True):
        if has_mount_point:
            state.store.mkdir()
        with pytest.raises(BackupError, match=r"lists 2 checkpoints; mount the store"):
            back_up(state, copied.append)

    assert copied == []


def test_a_store_that_is_unmounted_meanwhile_is_not_taken_for_an_empty_one(state: State) -> None:
    def unmount() -> None:
        shutil.move(state.store, state.folder / "away")

    with pytest.raises(BackupError, match=r"lists 2 checkpoints; mount the store"):
        back_up(state, once(unmount))


def test_unfinished_uploads_are_left_out_of_the_catalog(state: State) -> None:
    def upload(upload_id: str, *, is_finished: bool) -> Upload:
        return Upload(
            id=upload_id,
            owner="me",
            manifest={},
            adapter_config={},
            size_bytes=1,
            expires_at=now(),
            is_finished=is_finished,
        )

    state.change(lambda catalog: catalog.add_upload(upload("open", is_finished=False), 9))
    state.change(lambda catalog: catalog.add_upload(upload("done", is_finished=True), 9))
    _, copy = back_up(state)

    assert copy.change(lambda catalog: catalog.upload("open")) is None
    assert copy.change(lambda catalog: catalog.upload("done")) is not None


def test_a_run_that_is_resumed_while_it_is_copied_is_in_its_journal(state: State) -> None:
    shutil.rmtree(state.journals)
    JournalFolder(state.journals, f"{RUN}0").write_manifest(journal_manifest())
    state.suspend(state.store, "p", b"suspended")
    sizes: list[int] = []
    first = (state.folder / "version.json").stat().st_size

    def resume(size: int) -> None:
        """As a head does after the journals were found, and before suspended states are."""
        sizes.append(size)
        suspended = state.store / "runs" / RUN / "suspended"
        if sum(sizes) > first and suspended.exists():
            shutil.rmtree(suspended)
            JournalFolder(state.journals, RUN).write_manifest(journal_manifest())

    manifest, _ = back_up(state, resume)

    assert f"heads/m-1/journals/runs/{RUN}/journal/manifest.json" in manifest.files
    assert f"checkpoints/runs/{RUN}/suspended/manifest.json" not in manifest.files


def a_record(index: int) -> Record:
    entry = Entry(seq_id=index, path="/forward", role="gradient", digest="d", size=1)
    return Record(index, entry, b"x" * 3000)


def test_a_journal_is_copied_as_a_killed_head_could_have_left_it(tmp_path: Path) -> None:
    state = State.make(tmp_path / "state")
    shutil.rmtree(state.journals)
    folder, is_stopping = JournalFolder(state.journals, RUN), threading.Event()
    folder.write_manifest(journal_manifest())

    def train() -> None:
        """Write records one after another, with a snapshot after every 20, as a head does."""
        index, number = 0, 1
        while not is_stopping.is_set():
            segment = folder.create(number)
            for _ in range(20):
                segment.write(records.encode(a_record(index)))
                index += 1
            segment.close()
            number += 1
            old = list((state.journals / "runs" / RUN).glob("suspended/*/"))
            state.suspend(state.journals, f"p{index}", b"%d" % index)
            for each in old:
                shutil.rmtree(each)
            folder.remove_before(number - 1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        copies = [_copied(state, tmp_path / f"copy-{index}") for index in range(40)]
    finally:
        is_stopping.set()
        thread.join()

    assert max(copies) > 20


def _copied(state: State, target: Path) -> int:
    """Copy the journal while it is written; return the number after its last record."""
    with open_files.opened(partial(open_files.journal, state.journals, RUN)) as unit:
        assert unit is not None
        assert unit.damage is None
        for each in unit.files:
            file = target / each.path.relative_to(state.journals)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(each.file.read(each.size))
            assert each.expected in {None, stored(file.read_bytes())}
    found = JournalFolder(target, RUN).read()
    snapshots = [*target.glob(f"runs/{RUN}/suspended/*/head.json")]
    assert len(snapshots) <= 1
    first = int(snapshots[0].read_bytes()) if snapshots else 0
    # Nothing between the snapshot and the records is missing.
    assert not found or found[0].index <= first
    return found[-1].index + 1 if found else first


def test_a_record_that_is_being_written_is_copied_in_part(state: State) -> None:
    encoded = records.encode(a_record(0)) + records.encode(a_record(1))
    segment = state.journals / "runs" / RUN / "journal" / "00000001.log"
    segment.write_bytes(encoded[:-100])

    def write_on() -> None:
        with segment.open("ab") as file:
            file.write(encoded[-100:])

    with open_files.opened(partial(open_files.journal, state.journals, RUN)) as unit:
        assert unit is not None
        write_on()
        (copied,) = [each for each in unit.files if each.path == segment]
        assert copied.file.read(copied.size) == encoded[:-100]
    assert len(records.decode(encoded[:-100], "it")[0]) == 1


def test_a_copied_journal_comes_with_the_snapshot_that_its_newest_base_names(
    state: State,
) -> None:
    root = state.store / "journals"
    snapshot = state.suspend(root, "p", b"snapshot")
    bases = [None, Base(snapshot=snapshot, first_index=0), None]
    for number, base in enumerate(bases, 1):
        header = Header(manifest=journal_manifest(), start_index=0, next_index=0, base=base)
        state.put(f"journals/{object_key(RUN, number)}", encode(header, b""))
    manifest, _ = back_up(state)

    names = {name for name in manifest.files if name.startswith("checkpoints/journals/")}
    prefix = f"checkpoints/journals/runs/{RUN}"
    assert names == {
        *(f"{prefix}/journal/{number:010d}" for number in (1, 2, 3)),
        f"{prefix}/suspended/p/head.json",
    }
    assert manifest.damaged == {}

    (root / snapshot.key_of("head.json")).unlink()
    manifest, _ = back_up(state)
    assert manifest.damaged == {
        f"the copied journal of training run {RUN}": "its snapshot lacks the file head.json"
    }


def test_files_that_keep_changing_fail_the_backup_with_what_to_do(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "_PAUSE_SECONDS", 0)

    def gone(_: ExitStack) -> None:
        raise FileNotFoundError

    with (
        pytest.raises(BackupError, match="run the command again"),
        open_files.opened(gone),
    ):
        pass


def test_settings_are_backed_up_without_secrets_and_can_be_used_again(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"bootstrap_key": "tml-a-key-of-this-test", "signing_key": "s1gning-key-" * 4}
    settings = Settings(
        state_dir=state.folder,
        bootstrap_key=secrets["bootstrap_key"],
        models={'tiny/"ll\\ama" é': "/models/tiny", "b": "/b"},
        limits={"max_lora_rank": 8},
        downloads={"signing_key": secrets["signing_key"], "url_seconds": 600},
        tenants={"research": {"owners": ["ada"], "limits": {"models": 4}}},
        audit_days=5,
        preload=False,
    )
    server_settings.write(state.folder, settings)
    manifest, copy = back_up(state)

    text = (copy.folder / "settings.toml").read_text()
    assert not [secret for secret in secrets.values() if secret in text]
    assert manifest.left_out == ["bootstrap_key", "downloads.signing_key", "state_dir"]
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(copy.folder / "settings.toml"))
    again = Settings()
    for name in ("models", "limits", "tenants", "audit_days", "preload"):
        assert getattr(again, name) == getattr(settings, name)
    assert again.downloads.url_seconds == 600
    assert again.bootstrap_key is None


def test_a_store_other_than_that_of_the_server_is_not_backed_up(
    state: State, tmp_path: Path
) -> None:
    used = Settings(state_dir=state.folder, checkpoint_root=str(tmp_path / "used"))
    server_settings.write(state.folder, used)

    with pytest.raises(BackupError, match=r"set TINKERCLOUD_CHECKPOINT_ROOT"):
        create.sources(state.settings, checkpoints=True, journals=False)
    create.sources(used, checkpoints=True, journals=False)
    create.sources(state.settings, checkpoints=False, journals=False)


def test_a_store_or_a_database_elsewhere_is_refused_with_what_to_use_instead(
    state: State,
) -> None:
    bucket = Settings(state_dir=state.folder, checkpoint_root="s3://bucket/prefix")
    with pytest.raises(BackupError, match="its provider's tools"):
        create.sources(bucket, checkpoints=True, journals=False)
    url = "postgresql+asyncpg://me:secret@db.example/tinkercloud"
    database = Settings(state_dir=state.folder, database_url=url)
    with pytest.raises(BackupError) as refused:
        create.sources(database, checkpoints=False, journals=False)
    assert "pg_dump --format=custom" in str(refused.value)
    assert "pg_restore --clean" in str(refused.value)
    assert "secret" not in str(refused.value)
    pods = Settings(state_dir=state.folder, provider="kubernetes", checkpoint_root="s3://b")
    with pytest.raises(BackupError, match="on the disks of the heads' pods"):
        create.sources(pods, checkpoints=False, journals=True)


def test_a_catalog_that_another_release_made_is_backed_up_by_that_release(state: State) -> None:
    with pytest.raises(BackupError, match="use the `tinkercloud` command of the release"):
        create._require_current(
            archive.Header(
                created_at=now(),
                catalog_revisions=["0.0.9"],
                has_checkpoints=False,
                has_journals=False,
            )
        )


def test_the_manifest_in_the_file_has_versions_time_and_sums(state: State) -> None:
    manifest, copy = back_up(state)

    read = decode_manifest(Manifest, (copy.folder / "manifest.json").read_bytes(), "it")
    assert read == manifest
    assert (read.format_version, bool(read.release)) == (1, True)
    for name, file in read.files.items():
        assert stored((copy.folder / name).read_bytes()) == file
