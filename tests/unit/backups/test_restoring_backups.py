"""Restores: of whole and damaged backups, onto used folders and full disks, and killed ones."""

import errno
import fcntl
import gc
import io
import json
import os
import re
import shutil
import sqlite3
import sys
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tinkercloud_api.admin.backup import create, restore, verify
from tinkercloud_api.admin.backup.archive import Header, Manifest
from tinkercloud_api.catalog.backup import BackupError
from tinkercloud_api.commands.backup_commands import app
from tinkercloud_api.commands.common.progress import CopyProgress, note_output
from tinkercloud_api.config import pending_restore, state_folder
from tinkercloud_api.config.pending_restore import Restore
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.config.state_folder import StateFolderError, StateFolderLock
from tinkercloud_protocol.heads import checkpoint_manifest
from tinkercloud_protocol.heads.releases import this_release
from tinkercloud_testing.storage.backed_up import State, contents, now
from tinkercloud_testing.storage.disks import no_files_over


def nothing(_: int) -> None:
    """Do nothing with the bytes that were copied."""


def backed_up(state: State, *, is_all: bool = True) -> bytes:
    """Return a backup of a state."""
    workspace = state.folder.with_name(f"workspace of {state.folder.name}")
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.mkdir()
    output = io.BytesIO()
    source = create.sources(state.settings, checkpoints=is_all, journals=is_all)
    create.create(source, output, workspace, nothing)
    return output.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The state that was backed up; no test changes it."""
    state = State.make(tmp_path_factory.mktemp("made") / "state")
    state.suspend(state.store, "p", b"suspended")
    return state


@pytest.fixture(scope="module")
def backup(made: State) -> bytes:
    return backed_up(made)


def restored(
    backup: bytes,
    folder: Path,
    *,
    replaces: bool = False,
    progress: Callable[[int], object] = nothing,
    **settings: Any,
) -> Manifest:
    """Restore a backup to a folder."""
    where = restore.target(Settings(state_dir=folder, **settings), replaces=replaces)
    return restore.restore(io.BytesIO(backup), "it", where, progress)


def is_whole(folder: Path, made: State) -> bool:
    """Whether a folder has what was backed up, and nothing else."""
    found, wanted = contents(folder), contents(made.folder)
    for each in (found, wanted):
        each.pop("catalog.db")
    del wanted["heads/m-1/head.log"]
    return found == wanted and State(folder).listed() == made.listed()


def test_a_restored_state_is_the_one_that_was_backed_up(
    made: State, backup: bytes, tmp_path: Path
) -> None:
    manifest = restored(backup, tmp_path / "new" / "state")

    assert is_whole(tmp_path / "new" / "state", made)
    assert (manifest.has_checkpoints, manifest.has_journals) == (True, True)
    assert (tmp_path / "new" / "state" / "catalog.db").stat().st_mode & 0o777 == 0o600


def test_checkpoints_are_restored_to_the_root_that_the_settings_name(
    made: State, backup: bytes, tmp_path: Path
) -> None:
    restored(backup, tmp_path / "state", checkpoint_root=str(tmp_path / "store"))

    assert contents(tmp_path / "store") == contents(made.store)
    assert not (tmp_path / "state" / "checkpoints").exists()
    with pytest.raises(BackupError, match="set to a folder"):
        restored(backup, tmp_path / "other", checkpoint_root="s3://bucket")
    with pytest.raises(BackupError, match="unset TINKERCLOUD_DATABASE_URL"):
        restored(backup, tmp_path / "other", database_url="sqlite+aiosqlite:///x.db")


def test_a_used_folder_is_only_replaced_on_request(made: State, backup: bytes, used: State) -> None:
    before = contents(used.folder)

    with pytest.raises(BackupError, match=r"is not empty: it has .*--replace"):
        restored(backup, used.folder)
    assert contents(used.folder) == before

    restored(backup, used.folder, replaces=True)
    assert is_whole(used.folder, made)


def test_parts_that_a_backup_does_not_have_stay(made: State, used: State) -> None:
    catalog_only = backed_up(made, is_all=False)
    before = contents(used.folder)

    restored(catalog_only, used.folder, replaces=True)

    after = contents(used.folder)
    assert {name for name in before if before[name] != after.get(name)} == {"catalog.db"}
    assert used.listed() == made.listed()


@pytest.mark.parametrize("part", range(8))
def test_a_cut_or_changed_backup_is_refused_and_changes_nothing(
    backup: bytes, tmp_path: Path, part: int
) -> None:
    place = len(backup) * part // 8
    damaged = {
        "cut": backup[:place],
        "changed": backup[:place] + bytes([backup[place] ^ 1]) + backup[place + 1 :],
    }
    # A changed byte may be padding between files, which is not read.
    start = backup.find(b"oneone") + part * 300
    damaged["changed content"] = backup[:start] + bytes([backup[start] ^ 1]) + backup[start + 1 :]
    for how, content in damaged.items():
        workspace = tmp_path / how
        workspace.mkdir()
        try:
            verify.verify(io.BytesIO(content), "it", workspace, nothing)
        except BackupError:
            with pytest.raises(BackupError, match=r"^it |the .* of it"):
                restored(content, tmp_path / "new")
            assert contents(tmp_path / "new") == {}
        else:
            assert how == "changed"
            assert place > 0


def without(backup: bytes, name: str) -> bytes:
    """Return a backup that has lost a file, with a manifest that does not know it either."""
    output = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(backup)) as source,
        tarfile.open(fileobj=output, mode="w") as target,
    ):
        for member in source:
            content = source.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "manifest.json":
                manifest = Manifest.model_validate_json(content)
                del manifest.files[name]
                content = checkpoint_manifest.encode_manifest(manifest)
                member.size = len(content)
            if member.name != name:
                target.addfile(member, io.BytesIO(content))
    return output.getvalue()


def test_a_backup_without_a_checkpoint_that_its_catalog_names_is_refused(
    made: State, backup: bytes, tmp_path: Path
) -> None:
    folder = f"checkpoints/{made.path('one').prefix}"
    for name, why in {
        "manifest.json": "not in its files",
        "model.safetensors": "is missing",
    }.items():
        with pytest.raises(BackupError, match=f"/one is in its catalog, and .*{why}"):
            restored(without(backup, f"{folder}/{name}"), tmp_path / "new")
        assert contents(tmp_path / "new") == {}


def of_a_newer_release(monkeypatch: pytest.MonkeyPatch, **changes: object) -> bytes:
    """Return the beginning of a backup of another release."""
    header = Header(
        created_at=now(), catalog_revisions=[], has_checkpoints=False, has_journals=False
    ).model_copy(update={"release": "9.0.0", **changes})
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint_manifest, "this_release", lambda: "9.0.0")
        content = checkpoint_manifest.encode_manifest(header)
    output, member = io.BytesIO(), tarfile.TarInfo("backup.json")
    member.size = len(content)
    with tarfile.open(fileobj=output, mode="w") as tar:
        tar.addfile(member, io.BytesIO(content))
    return output.getvalue()


def test_a_backup_of_a_newer_release_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = of_a_newer_release(monkeypatch, format_version=2)
    with pytest.raises(BackupError) as refused:
        restored(newer, tmp_path)
    assert "has version 2 (of release 9.0.0)" in str(refused.value)
    assert "use release 9.0.0 or newer" in str(refused.value)

    newer = of_a_newer_release(monkeypatch, catalog_revisions=["9.0.0_quotas"])
    with pytest.raises(BackupError) as refused:
        restored(newer, tmp_path)
    assert "the catalog of it has revision 9.0.0_quotas (of release 9.0.0)" in str(refused.value)
    assert "use release 9.0.0 or newer" in str(refused.value)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("name", ["../x", "/x", "heads/../../x", "catalog.db/x", "heads", "x"])
def test_a_backup_writes_nothing_outside_of_the_state_folder(
    backup: bytes, tmp_path: Path, name: str
) -> None:
    output = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(backup)) as source,
        tarfile.open(fileobj=output, mode="w") as tar,
    ):
        for member in source:
            content = source.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "version.json":
                member.name = name
            tar.addfile(member, io.BytesIO(content))

    with pytest.raises(BackupError, match="no backup"):
        restored(output.getvalue(), tmp_path / "a" / "state")
    assert contents(tmp_path) == {}


def test_a_running_server_a_head_of_a_killed_one_and_another_restore_are_left_alone(
    made: State, backup: bytes, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with (
        StateFolderLock(folder, "http://127.0.0.1:1"),
        pytest.raises(StateFolderError, match="already serves"),
    ):
        restored(backup, folder)
    lock = folder / "heads" / "m-1" / "head.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BackupError, match=r"session head in .* is still running"):
            restored(backup, folder, replaces=True)
    shutil.rmtree(folder / "heads")

    refused: list[str] = []

    def second(_: int) -> None:
        if refused:
            return
        for attempt in (lambda: restored(backup, folder), lambda: state_folder.make(folder)):
            with pytest.raises(StateFolderError) as error:
                attempt()
            refused.append(str(error.value))

    restored(backup, folder, progress=second)
    assert all("is restoring a backup" in each for each in refused)
    assert len(refused) == 2
    assert is_whole(folder, made)
    assert state_folder.running_server(folder) is None


def in_a_process(work: Callable[[], int]) -> int:
    """Return the status of a process that does something: what it returns, or -1 if it raises."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)
    status = 255
    try:
        status = work()
    finally:
        os._exit(status)


OPERATIONS = ("rename", "replace", "unlink", "mkdir", "rmdir")
KILLED = 9


def die_before(number: int) -> None:
    """End this process before an operation on files, by its number from now on."""
    left = number

    def dying(original: Callable[..., object]) -> Callable[..., object]:
        def act(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(KILLED)
            return original(*arguments, **options)

        return act

    for name in OPERATIONS:
        setattr(os, name, dying(getattr(os, name)))


@pytest.fixture
def used(tmp_path: Path) -> State:
    """The state of a server that is to be replaced."""
    used = State.make(tmp_path / "used")
    used.save("later", b"later")
    used.put("deferred/x/1", b"x")
    return used


def test_a_restore_that_is_killed_while_it_writes_leaves_the_old_state(
    backup: bytes, used: State
) -> None:
    old = contents(used.folder)
    sizes: list[int] = []

    def die(size: int) -> None:
        sizes.append(size)
        if sum(sizes) > len(backup) // 2:
            os._exit(KILLED)

    def killed() -> int:
        restored(backup, used.folder, replaces=True, progress=die)
        return 0

    assert in_a_process(killed) == KILLED
    assert [*used.folder.rglob(pending_restore.STAGING)]
    # The next user of the folder finishes it.
    state_folder.make(used.folder)
    assert contents(used.folder) == old


def test_a_restore_that_is_killed_at_any_step_of_replacing_leaves_the_old_or_the_new_state(
    made: State, backup: bytes, used: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, folder = contents(used.folder), used.folder

    def staged() -> int:
        """Write everything, and decide nothing."""

        def leave(_: Path, decision: Restore) -> None:
            (tmp_path / "decision.json").write_text(decision.model_dump_json())
            os._exit(KILLED)

        monkeypatch.setattr(pending_restore, "commit", leave)
        restored(backup, folder, replaces=True)
        return 0

    assert in_a_process(staged) == KILLED
    decision = Restore.model_validate_json((tmp_path / "decision.json").read_text())
    shutil.copytree(folder, tmp_path / "staged")
    restored(backup, tmp_path / "whole")
    new = contents(tmp_path / "whole")
    outcomes: list[dict[str, bytes]] = []
    was_killed = True
    while was_killed:

        def replace() -> int:
            die_before(len(outcomes))
            pending_restore.commit(folder, decision)
            pending_restore.finish(folder)
            return 0

        was_killed = in_a_process(replace) == KILLED
        # The next user of the folder finishes it.
        state_folder.make(folder)
        outcomes.append(contents(folder))
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "staged", folder)

    assert [outcome for outcome in outcomes if outcome not in (old, new)] == []
    assert [outcomes[0] == old, outcomes[-1] == new] == [True, True]
    assert len(outcomes) > 20
    assert is_whole(tmp_path / "whole", made)


def test_a_restore_on_a_full_disk_says_so_and_changes_nothing(backup: bytes, used: State) -> None:
    before = contents(used.folder)

    def restore_on_it() -> int:
        with no_files_over(1000):
            try:
                restored(backup, used.folder, replaces=True)
            except BackupError as error:
                return 7 if re.search("cannot write .*; nothing was changed", str(error)) else 1
        return 0

    assert in_a_process(restore_on_it) == 7
    assert contents(used.folder) == before


def command(*arguments: str, state_dir: Path, stdin: bytes | None = None) -> Result:
    """Run `tinkercloud backup` in this process, as if it began now."""
    note_output()
    environment = {"TINKERCLOUD_STATE_DIR": str(state_dir), "COLUMNS": "1000"}
    umask = os.umask(0o077)
    try:
        return CliRunner().invoke(app, [*arguments], input=stdin, env=environment)
    finally:
        os.umask(umask)


def test_a_backup_on_a_full_disk_says_so_and_leaves_nothing(made: State, tmp_path: Path) -> None:
    file = tmp_path / "b.tar"

    def back_up_on_it() -> int:
        with no_files_over(1000):
            result = command("create", str(file), "--checkpoints", state_dir=made.folder)
        said = " ".join(result.stderr.split())
        is_clear = re.search(r"error: cannot (copy|write) .*nothing was written", said) is not None
        return 7 if is_clear and result.exit_code == 1 else 1

    assert in_a_process(back_up_on_it) == 7
    assert list(tmp_path.iterdir()) == []

    def back_up_to_a_full_device() -> int:
        unraisable, found = list[object](), 0
        sys.unraisablehook = unraisable.append
        try:
            source = create.sources(made.settings, checkpoints=True, journals=True)
            with Path("/dev/full").open("wb") as full:
                create.create(source, full, tmp_path, nothing)
        except OSError as error:
            found = error.errno or 0
        gc.collect()
        return 1 if unraisable else found

    assert in_a_process(back_up_to_a_full_device) == errno.ENOSPC


def test_the_commands_make_check_and_restore_a_file_or_a_pipe(made: State, tmp_path: Path) -> None:
    file = tmp_path / "b.tar"
    created = command("create", str(file), "--checkpoints", "--json", state_dir=made.folder)
    said = json.loads(created.stdout)
    assert (said["checkpoints"], said["has_journals"], said["damaged"]) == (2, False, {})
    assert said["release"] == this_release()
    assert re.search(r"^copied [0-9.]+ KiB of [0-9.]+ KiB$", created.stderr, re.MULTILINE)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar"]
    again = command("create", str(file), state_dir=made.folder)
    assert "already exists; choose a new file" in again.stderr
    with closing(sqlite3.connect(made.folder / "catalog.db")) as catalog:
        query = "SELECT details FROM audit_log WHERE event = 'backup_create' ORDER BY id"
        rows = [json.loads(details) for (details,) in catalog.execute(query)]
    assert [row["status"] for row in rows[-4:]] == ["started", "done", "started", "failed"]
    assert rows[-4]["path"] == f"tinkercloud backup create {file} --checkpoints"

    piped = command("create", "-", state_dir=made.folder)
    assert piped.exit_code == 0
    assert "backed up to standard output" in piped.stderr
    checked = command("verify", "-", state_dir=tmp_path, stdin=piped.stdout_bytes)
    assert "standard input is complete" in checked.stdout

    restoring = command("restore", "-", state_dir=tmp_path / "new", stdin=file.read_bytes())
    assert restoring.exit_code == 0, restoring.stderr
    assert "restored standard input to" in restoring.stdout
    assert "checkpoints: 2\njournals: not included\n" in restoring.stdout
    assert State(tmp_path / "new").listed() == made.listed()
    served = f"serve it with: tinkercloud serve --state-dir {tmp_path / 'new'}\n"
    assert restoring.stderr.endswith(served)

    for arguments, why in {
        ("verify", str(tmp_path / "none")): "No such file",
        ("create", "-", "--json"): "leave --json out",
        ("create", str(tmp_path / "no" / "b.tar")): "No such file",
        ("restore", str(file)): "--replace",
    }.items():
        refused = command(*arguments, state_dir=tmp_path / "new")
        assert (refused.exit_code, why in refused.stderr) == (1, True), refused.stderr


@pytest.mark.parametrize("place", ["", "b.tar", "heads/../new/b.tar", "checkpoints/b.tar"])
def test_a_backup_among_the_files_that_it_copies_is_refused_and_nothing_is_written(
    used: State, place: str
) -> None:
    before = contents(used.folder)

    refused = command("create", str(used.folder / place), "--checkpoints", state_dir=used.folder)

    assert refused.exit_code == 1
    assert "which is backed up; choose a file elsewhere" in refused.stderr
    assert contents(used.folder) == before


def test_a_link_into_the_state_folder_is_refused_too(used: State, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(used.folder)

    refused = command("create", str(tmp_path / "link" / "b.tar"), state_dir=used.folder)

    assert (refused.exit_code, "which is backed up" in refused.stderr) == (1, True)


def test_the_state_of_a_newer_release_is_replaced_by_that_of_a_backup_from_before(
    made: State, backup: bytes, used: State
) -> None:
    newer = {"version": 99, "release": "9.0.0"}
    (used.folder / state_folder.VERSION_FILE).write_text(json.dumps(newer))
    with pytest.raises(StateFolderError, match=r"9\.0\.0"):
        state_folder.check_version(used.folder)

    restored(backup, used.folder, replaces=True)

    state_folder.check_version(used.folder)
    assert is_whole(used.folder, made)


def test_a_state_is_replaced_only_when_it_is_agreed_to(backup: bytes, used: State) -> None:
    file = used.folder.parent / "b.tar"
    file.write_bytes(backup)
    before = used.listed()

    piped = command("restore", "-", "--replace", state_dir=used.folder, stdin=backup)
    assert (piped.exit_code, "add --yes" in piped.stderr) == (1, True)
    unasked = command("restore", str(file), "--replace", state_dir=used.folder)
    assert (unasked.exit_code, "use --yes" in unasked.stderr) == (1, True)
    assert used.listed() == before

    agreed = command("restore", "-", "--replace", "--yes", state_dir=used.folder, stdin=backup)
    assert agreed.exit_code == 0, agreed.stderr
    assert used.listed() != before


def test_progress_without_a_terminal_is_lines_in_binary_units(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._LINE_SECONDS", 0.0)
    progress = CopyProgress("copied", 3 << 20)
    progress(1 << 20)
    progress(1 << 20)
    progress.finish()

    assert capsys.readouterr().err.splitlines() == [
        "copied 1.0 MiB of 3.0 MiB",
        "copied 2.0 MiB of 3.0 MiB",
        "copied 2.0 MiB of 2.0 MiB",
    ]
