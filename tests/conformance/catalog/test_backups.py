"""The commands of "Backing up" in docs/operate/operations.md, run as they are written.

A server trains while it is backed up. Everything that it has is deleted, and another folder, as on
another machine, gets the backup. Of a cluster, the catalog in PostgreSQL and the bucket are deleted
and restored; the objects of Kubernetes are not part of this.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path

import obstore
import pytest
import tinker
from obstore.store import ObjectStore

from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.storage.buckets import a_bucket
from tinkercloud_testing.storage.postgresql import PostgreSQL, a_postgresql
from tinkercloud_testing.storage.state_of_release import Run, continued

MODEL = "tiny/llama"
SETTINGS = {
    "TINKERCLOUD_DURABILITY__SNAPSHOT_STEPS": "4",
    "TINKERCLOUD_AUTOSAVE__STEPS": "0",
}
PAGE = (Path(__file__).parents[3] / "docs/operate/operations.md").read_text()
SECTION = PAGE.partition("\n## Backing up\n")[2].partition("\n## ")[0]
BACK_UP, RESTORE = re.findall(r"^```sh\n(.*?)^```", SECTION, re.M | re.S)
DATABASE = "postgresql://tinkercloud@postgres.example.com/tinkercloud"
DUMP, RESTORE_DUMP = re.findall(rf"^\$ (pg_(?:dump|restore) .*{DATABASE}.*)$", SECTION, re.M)


def run(server: Server, commands: str, folder: Path) -> None:
    """Run commands of the page in a folder, for the state folder of a server."""
    program = f'tinkercloud() {{ "{sys.executable}" -m tinkercloud_api "$@"; }}\n'
    subprocess.run(
        ["/bin/sh", "-eu", "-c", program + commands],
        env={**server.environment(), "PATH": os.environ["PATH"]},
        cwd=folder,
        check=True,
    )


class Training:
    """A run that trains until it is stopped."""

    def __init__(self, client: tinker.TrainingClient) -> None:
        self._client = client
        self.run_id = str(client.model_id)
        self.losses: list[float] = []
        """The loss before each step."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._is_stopping:
            self.losses.append(step(self._client))

    def stop_after(self, count: int) -> None:
        """Stop after some more steps."""
        last = len(self.losses) + count
        wait_until(lambda: len(self.losses) >= last or not self._thread.is_alive(), "the steps")
        self._is_stopping = True
        self._thread.join()


def next_steps(training: tinker.TrainingClient, count: int) -> tuple[int, Sequence[float]]:
    """Train; return the number of steps before, and the loss before each of these."""
    losses: list[float] = []
    numbers: list[int] = []
    for _ in range(count):
        passed = training.forward_backward([a_datum()], "cross_entropy")
        applied = training.optim_step(ADAM).result()
        assert applied.metrics is not None
        numbers.append(int(applied.metrics["step"]))
        losses.append(passed.result().metrics["loss:sum"])
    return numbers[0] - 1, losses


def attached(server: Server, run_id: str) -> tinker.TrainingClient:
    """Return a new client that continues a run."""
    answer = server.post("attach_model", {"model_id": run_id})
    assert answer.status == 200, answer.body
    return continued(server, Run(run_id, answer.json()["next_seq_id"] - 1))


def projects(server: Server) -> set[str]:
    listed = server.request("GET", "/api/v1/projects").json()["projects"]
    return {project["name"] for project in listed}


def test_a_backup_made_while_a_run_trains_is_restored_elsewhere_bit_for_bit(
    tmp_path: Path, model_folder: Path
) -> None:
    original, copy = tmp_path / "state", tmp_path / "another machine" / "state"
    with a_server(original, {MODEL: model_folder}, SETTINGS) as server:
        key = server.new_key("colleague")
        for index in range(3):
            server.new_project(f"project-{index}")
        client = server.client()
        create = client.create_lora_training_client
        kept = create(base_model=MODEL, rank=4, seed=1).result()
        step(kept)
        checkpoint = kept.save_state("kept").result().path
        after_checkpoint = [step(kept) for _ in range(3)]

        training = Training(create(base_model=MODEL, rank=4, seed=2).result())
        wait_until(lambda: len(training.losses) >= 6, "a snapshot and more steps")
        started_at = len(training.losses)
        run(server, BACK_UP, tmp_path)
        training.stop_after(8)
        server.kill()
        server.kill_heads()
    shutil.rmtree(original)
    with tarfile.open(tmp_path / "tinkercloud-backup.tar") as tar:
        manifest = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
    assert (manifest["damaged"], manifest["left_out"]) == ({}, ["bootstrap_key", "state_dir"])

    elsewhere = {"TINKERCLOUD_CONFIG_FILE": str(copy / "settings.toml")}
    run(Server({}, copy), RESTORE, tmp_path)
    with a_server(copy, {}, elsewhere) as server:
        assert projects(server) >= {f"project-{index}" for index in range(3)}
        assert server.request("GET", "/api/v1/projects", key=key).status == 200
        load = server.client().create_training_client_from_state_with_optimizer
        resumed = load(checkpoint).result()
        assert [step(resumed) for _ in range(3)] == after_checkpoint

        count, losses = next_steps(attached(server, training.run_id), 3)
        assert count >= started_at
        assert losses == training.losses[count : count + 3]
        listed = server.rest().list_checkpoints(str(kept.model_id)).result().checkpoints
        assert [each.tinker_path for each in listed] == [checkpoint]

        unknown = server.request("GET", f"/api/v1/runs/{kept.model_id}0")
        assert unknown.status == 404
        assert "The catalog was restored from a backup of 20" in unknown.json()["detail"]


def run_on(postgresql: PostgreSQL, url: str, command: str, folder: Path) -> None:
    """Run a command of the page in a folder, for a database."""
    path = f"{postgresql.programs}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["/bin/sh", "-eu", "-c", command.replace(DATABASE, url.replace("+asyncpg", ""))],
        env={**os.environ, "PATH": path},
        cwd=folder,
        check=True,
    )


def content_of(store: ObjectStore) -> dict[str, bytes]:
    """Return all objects of a store, as a copy by its provider has them."""
    found = [each["path"] for part in obstore.list(store) for each in part]
    return {path: bytes(obstore.get(store, path).bytes()) for path in found}


@pytest.mark.long
def test_a_catalog_in_postgresql_and_a_bucket_are_restored_and_a_suspended_run_continues(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_postgresql() as postgresql, a_bucket("127.0.0.1") as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        store = open_store(bucket.url("checkpoints"))
        lost = postgresql.new_database()
        settings = {"TINKERCLOUD_CHECKPOINT_ROOT": bucket.url("checkpoints")}
        before = {**settings, "TINKERCLOUD_DATABASE_URL": lost}
        with a_server(tmp_path / "state", {MODEL: model_folder}, before) as server:
            key = server.new_key("colleague")
            server.new_project("vision")
            training = server.client().create_lora_training_client(MODEL, rank=4, seed=1).result()
            step(training)
            checkpoint = training.save_state("kept").result().path
            after_checkpoint = [step(training) for _ in range(2)]
            run_id = str(training.model_id)
            address = ("--api-key", API_KEY, "--base-url", server.url)
            server.command("runs", "stop", run_id, "--suspend", "--yes", *address)
            run_on(postgresql, lost, DUMP, tmp_path)
            copied = content_of(store)
            expected = [step(training) for _ in range(3)]
            server.kill()
            server.kill_heads()

        shutil.rmtree(tmp_path / "state")
        for path in content_of(store):
            obstore.delete(store, path)
        found = postgresql.new_database()
        run_on(postgresql, found, RESTORE_DUMP, tmp_path)
        for path, content in copied.items():
            obstore.put(store, path, content)
        after = {**settings, "TINKERCLOUD_DATABASE_URL": found}
        with a_server(tmp_path / "elsewhere", {MODEL: model_folder}, after) as server:
            assert "vision" in projects(server)
            assert server.request("GET", "/api/v1/projects", key=key).status == 200
            count, losses = next_steps(attached(server, run_id), 3)
            assert (count, losses) == (3, expected)
            load = server.client().create_training_client_from_state_with_optimizer
            resumed = load(checkpoint).result()
            assert [step(resumed) for _ in range(2)] == after_checkpoint
