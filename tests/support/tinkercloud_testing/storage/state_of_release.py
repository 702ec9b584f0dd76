"""The state that a release leaves behind: made by its server and the SDK, and continued by tests.

`python -m tinkercloud_testing.storage.state_of_release FILE`, with `tests/support` in
`PYTHONPATH`, makes
the archive `FILE` with this tree. It holds the folders `model` and `state`, and `expected.json`.
"""

import json
import shutil
import signal
import sqlite3
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

MODEL = "tiny/llama"
SETTINGS = {
    "TINKERCLOUD_DURABILITY__LEVEL": "remote",
    "TINKERCLOUD_DURABILITY__SNAPSHOT_STEPS": "2",
    "TINKERCLOUD_AUTOSAVE__STEPS": "0",
}
STEPS = 3
"""Optimizer steps of each run: the last one of a killed run is in its journal only."""
_OF_PROCESSES = (
    *("server.pid", "server.log", "heads/*/head.*", "heads/*/config.json", "heads/*/token"),
    "heads/*/scratch",
)
"""Files of the state folder that only the processes of this machine use."""


@dataclass(frozen=True)
class Run:
    """A run, and how many requests its client has sent."""

    model_id: str
    sent: int

    @classmethod
    def of(cls, training: tinker.TrainingClient) -> Self:
        """Return what is known of a client's run."""
        return cls(str(training.model_id), training._request_id_counter)


@dataclass(frozen=True)
class Expected:
    """What a later release must find in the state."""

    release: str
    suspended: Run
    """The run whose server was stopped."""
    killed: Run
    """A run whose head was killed: it has a snapshot and a journal."""
    moved: Run
    """Another one, of which only the copy in the checkpoint store is left."""
    checkpoint: str
    """`tinker://` path of a training checkpoint of the first run after `STEPS` steps."""
    sampler: str
    """`tinker://` path of its weights for sampling."""
    sampled: list[int]
    """What these weights answer to `sampled_tokens`."""
    next_loss: float
    """The loss of the next step of every run, and of the checkpoint."""


def sampled_tokens(sampler: tinker.SamplingClient) -> list[int]:
    """Return the most likely tokens after a fixed prompt."""
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    prompt = types.ModelInput.from_ints([5, 6, 7])
    return list(sampler.sample(prompt, 1, params).result().sequences[0].tokens)


def continued(server: Server, run: Run) -> tinker.TrainingClient:
    """Return the SDK client of a run as it was when the state was made."""
    info = types.GetInfoResponse.model_validate(
        server.post("get_info", {"model_id": run.model_id}).json()
    )
    holder = server.client().holder
    client = tinker.TrainingClient(holder, 0, types.ModelID(run.model_id), info=info)
    client._request_id_counter = client._turn_counter = run.sent
    return client


def make(archive: Path) -> Expected:
    """Train, save, stop and kill with this tree's server; write what it leaves behind."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = save(tiny_llama(), folder / "model")
        with a_server(folder / "state", {MODEL: model}, SETTINGS) as server:
            expected = _train(server)
        leave_out_processes(folder / "state")
        (folder / "expected.json").write_text(json.dumps(asdict(expected), indent=2))
        pack(archive, folder, "model", "state", "expected.json")
    return expected


def pack(archive: Path, folder: Path, *names: str) -> None:
    """Write an archive of files and folders of a folder."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as packed:
        for name in names:
            packed.add(folder / name, name)


def unpack(archive: Path, folder: Path) -> Expected:
    """Write a copy of a state to a folder; return what it must contain."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    content = json.loads((folder / "expected.json").read_text())
    for name in ("suspended", "killed", "moved"):
        content[name] = Run(**content[name])
    return Expected(**content)


def _train(server: Server) -> Expected:
    stopped = _a_run(server)
    checkpoint = stopped.save_state("kept").result().path
    sampler = stopped.save_weights_for_sampler("kept").result().path
    sampled = sampled_tokens(server.client().create_sampling_client(model_path=sampler).result())
    uninterrupted = _a_run(server)
    next_loss = step(uninterrupted)
    server.clients.close()
    server.stop()

    server.start()
    killed, moved = (_a_run(server) for _ in range(2))
    server.kill()
    server.kill_heads()
    for journals in server.state_dir.glob("heads/*/journals"):
        shutil.rmtree(journals / "runs" / moved.model_id)
    return Expected(
        release=server.command("--version").split()[-1],
        suspended=Run.of(stopped),
        killed=Run.of(killed),
        moved=Run.of(moved),
        checkpoint=checkpoint,
        sampler=sampler,
        sampled=sampled,
        next_loss=next_loss,
    )


def _a_run(server: Server) -> tinker.TrainingClient:
    """Train `STEPS` steps, always the same; the snapshot has all but the last of them."""
    create = server.client().create_lora_training_client
    training = create(base_model=MODEL, rank=4, seed=1).result()
    for _ in range(STEPS - 1):
        step(training)
    copies = f"checkpoints/journals/runs/{training.model_id}/suspended/*/*"
    wait_until(lambda: bool([*server.state_dir.glob(copies)]), "a snapshot")
    step(training)
    return training


def leave_out_processes(state: Path) -> None:
    """Delete what only processes of this machine use from the state folder of a killed server."""
    for pattern in _OF_PROCESSES:
        for path in state.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    catalog = sqlite3.connect(state / "catalog.db")
    catalog.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    catalog.close()


if __name__ == "__main__":
    # Clients that wait for a killed server do not end by themselves.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.write(f"{make(Path(sys.argv[1]))}\n")
