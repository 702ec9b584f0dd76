"""A server continues the state that the last release has left, and refuses that of a newer one.

`tests/data/states` has one archive, named after the release whose server made it
(`tinkercloud_testing.storage.state_of_release`).
"""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from tinkercloud_api.catalog.schema.connection import newest_revision
from tinkercloud_protocol.heads.releases import this_release
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.storage.state_of_release import (
    MODEL,
    SETTINGS,
    Expected,
    continued,
    sampled_tokens,
    unpack,
)

(ARCHIVE,) = (Path(__file__).parents[2] / "data" / "states").glob("*[0-9].tar.xz")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """A copy of the state, and what is in it; only the copy of a newer checkpoint is added."""
    folder = tmp_path_factory.mktemp("left")
    expected = unpack(ARCHIVE, folder)
    kept = next((folder / "state" / "checkpoints" / "runs").glob("*/weights/kept"))
    newer = shutil.copytree(kept, kept.with_name("newer")) / "manifest.json"
    content = json.loads(newer.read_bytes())
    content |= {"format_version": content["format_version"] + 1, "release": "9.0.0"}
    newer.write_text(json.dumps(content))
    return folder, expected


@pytest.fixture(scope="module")
def continuing(left: tuple[Path, Expected]) -> Iterator[Server]:
    """This tree's server on the state."""
    folder, _ = left
    copied = shutil.copytree(folder / "state", folder / "continued")
    with a_server(copied, {MODEL: folder / "model"}, SETTINGS) as running:
        yield running


@pytest.mark.parametrize("which", ["suspended", "killed", "moved"])
def test_a_run_of_the_last_release_continues_where_it_was(
    left: tuple[Path, Expected], continuing: Server, which: str
) -> None:
    _, expected = left
    training = continued(continuing, getattr(expected, which))

    assert step(training) == pytest.approx(expected.next_loss, rel=1e-4)


def test_checkpoints_of_the_last_release_are_loaded_and_give_the_same_tokens(
    left: tuple[Path, Expected], continuing: Server
) -> None:
    _, expected = left
    client = continuing.client()
    load = client.create_training_client_from_state_with_optimizer

    assert step(load(expected.checkpoint).result()) == pytest.approx(expected.next_loss, rel=1e-4)
    sampler = client.create_sampling_client(model_path=expected.sampler).result()
    assert sampled_tokens(sampler) == expected.sampled
    listed = continuing.rest().list_checkpoints(expected.suspended.model_id).result().checkpoints
    assert {"weights/kept", "sampler_weights/kept"} <= {each.checkpoint_id for each in listed}


def test_a_checkpoint_of_a_newer_release_is_refused_in_a_sentence(
    left: tuple[Path, Expected], continuing: Server
) -> None:
    _, expected = left
    path = expected.checkpoint.replace("/kept", "/newer")
    load = continuing.client().create_training_client_from_state

    with pytest.raises(tinker.TinkerError) as refused:
        load(path).result()

    assert f"{path} can't be read: its manifest.json has version 4 (of release 9.0.0)" in str(
        refused.value
    )
    assert "reads versions 1 to 3; use release 9.0.0 or newer, or a checkpoint" in str(
        refused.value
    )


def newer_folder(state: Path) -> str:
    """Make the state folder that of a newer release; return what a server must say of it."""
    file = state / "version.json"
    file.write_text('{"version": 2, "release": "9.0.0"}')
    return (
        f"error: state_dir: {file} has version 2 (of release 9.0.0), and release"
        f" {this_release()} reads version 1; use release 9.0.0 or newer, or restore a backup from"
        " before the upgrade"
    )


def newer_catalog(state: Path) -> str:
    """Make the catalog that of a newer release."""
    return _other_catalog(state, "9.0.0_quotas") + (
        f"release {this_release()} reads revisions up to {newest_revision()}; use release 9.0.0"
        " or newer, or restore a backup from before the upgrade"
    )


def newer_catalog_of_a_killed_server(state: Path) -> str:
    """Leave the change in the write-ahead log."""
    said = newer_catalog(state)
    shutil.copytree(state, state.with_name("log"))
    catalog = sqlite3.connect(state.with_name("log") / "catalog.db")
    catalog.execute("UPDATE alembic_version SET version_num = version_num")
    catalog.commit()
    for name in ("catalog.db-wal", "catalog.db-shm"):
        shutil.copy(state.with_name("log") / name, state / name)
    catalog.close()
    return said


def _other_catalog(state: Path, revision: str) -> str:
    file = state / "catalog.db"
    catalog = sqlite3.connect(file)
    catalog.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    catalog.commit()
    catalog.close()
    return (
        f"error: database_url: the catalog at sqlite+aiosqlite:///{file} has revision {revision},"
        " and "
    )


@pytest.mark.parametrize("change", [newer_folder, newer_catalog, newer_catalog_of_a_killed_server])
def test_a_refused_start_says_which_release_to_use_and_changes_nothing(
    left: tuple[Path, Expected], tmp_path: Path, change: Callable[[Path], str]
) -> None:
    state = shutil.copytree(left[0] / "state", tmp_path / "state")
    said = change(state)
    before = contents(state)

    server = Server({MODEL: left[0] / "model"}, state, SETTINGS)
    refused = subprocess.run(
        [sys.executable, "-m", "tinkercloud_api", "serve", f"--model={MODEL}={left[0] / 'model'}"],
        env=server.environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert refused.returncode == 1
    # A slow machine prints that it loads. Long lines are folded, also within a path.
    error = refused.stderr[refused.stderr.index("error: ") :]
    assert "".join(error.split()) == "".join(said.split())
    assert contents(state) == before


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return when each file and folder was changed, and what is in it."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [folder, *folder.rglob("*")]
        # A cache, which readers of the write-ahead log share.
        if path.suffix != ".db-shm"
    }
