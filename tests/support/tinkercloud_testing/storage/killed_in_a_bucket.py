"""The state that a killed server leaves with its checkpoint store in an S3 bucket.

It has what `state_of_release` lacks: a run that is suspended because its client was silent,
requests that were confirmed and not yet run, and automatic checkpoints.

`python -m tinkercloud_testing.storage.killed_in_a_bucket FILE [TREE]`, with `tests/support` in
`PYTHONPATH`, makes the archive `FILE`. It holds the folders `model`, `state` and `bucket`, and
`expected.json`. The server is that of `TREE`, the root of another working tree, if it is given.
"""

import json
import os
import signal
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import tinker

from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum, a_text, step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.storage.buckets import Bucket, a_bucket
from tinkercloud_testing.storage.state_of_release import MODEL, Run, leave_out_processes, pack

STORE = "checkpoints"
"""Folder of the bucket with the checkpoint store."""
STEPS = 3
"""Finished optimizer steps of each run."""
NUM_WAITING = 2
"""Steps of the killed run that were confirmed and not yet run."""
_SILENT_SECONDS = "1"
_LONG_TEXT = a_text([7] * 512, weights=[1.0] * 511)
_LONG_REQUESTS = 8
_TEXTS_OF_LONG_REQUESTS = 64


@dataclass(frozen=True)
class Expected:
    """What a later release must find in the state."""

    release: str
    idle: Run
    """A run that was suspended because its client was silent."""
    killed: Run
    """A run whose head was killed before its last `NUM_WAITING` steps."""
    waiting: list[str]
    """Ids of the requests for the losses of these steps."""
    autosave: str
    """`tinker://` path of the automatic checkpoint of the idle run after `STEPS` steps."""
    next_losses: list[float]
    """The losses of the next steps of a run that was not interrupted, with its server."""


def settings_of(bucket: Bucket) -> dict[str, str]:
    """Return the settings of a server whose checkpoint store is in a bucket."""
    return {
        **bucket.environment,
        "TINKERCLOUD_CHECKPOINT_ROOT": bucket.url(STORE),
        "TINKERCLOUD_DURABILITY__LEVEL": "remote",
        "TINKERCLOUD_DURABILITY__SNAPSHOT_STEPS": "2",
        "TINKERCLOUD_AUTOSAVE__STEPS": "1",
    }


def make(archive: Path, tree: Path | None = None) -> Expected:
    """Train and kill with a server; write what it leaves behind.

    Args:
        archive: what is written.
        tree: the root of the working tree with the server; None for this one.
    """
    with tempfile.TemporaryDirectory() as temporary, a_bucket("127.0.0.1") as bucket:
        folder = Path(temporary)
        model = save(tiny_llama(layers=1), folder / "model")
        settings = settings_of(bucket) | _imports_from(tree)
        silent = {"TINKERCLOUD_SESSION_SILENCE_SECONDS": _SILENT_SECONDS}
        idle = _leave_idle(Server({MODEL: model}, folder / "state", settings | silent), bucket)
        server = Server({MODEL: model}, folder / "state", settings)
        expected = _leave_requests(server, bucket, idle)
        leave_out_processes(folder / "state")
        bucket.copy(STORE, folder / "bucket")
        (folder / "expected.json").write_text(json.dumps(asdict(expected), indent=2))
        pack(archive, folder, "model", "state", "bucket", "expected.json")
    return expected


def unpack(archive: Path, folder: Path) -> Expected:
    """Write a copy of a state to a folder; return what it must contain."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    content = json.loads((folder / "expected.json").read_text())
    idle, killed = (Run(**content.pop(name)) for name in ("idle", "killed"))
    return Expected(idle=idle, killed=killed, **content)


def _imports_from(tree: Path | None) -> dict[str, str]:
    if tree is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(map(str, sorted(tree.resolve().glob("*/src"))))}


def _leave_idle(server: Server, bucket: Bucket) -> Run:
    """Train a run, wait until it is suspended, and kill its head."""
    server.start()
    training = _a_run(server)
    run = Run.of(training)
    state = f"runs/{run.model_id}/suspended/manifest.json"
    saved = f"{_autosave(run, STEPS)}/manifest.json"
    wait_until(lambda: {state, saved} <= {*bucket.names(STORE)}, "the suspended run")
    _kill(server)
    return run


def _leave_requests(server: Server, bucket: Bucket, idle: Run) -> Expected:
    server.start()
    release = server.command("--version").split()[-1]
    uninterrupted = _a_run(server)
    next_losses = [step(uninterrupted) for _ in range(STEPS)]
    training = _a_run(server)
    # They keep the head busy until it is killed.
    sent: list[object] = []
    for _ in range(_LONG_REQUESTS):
        sent += [training.forward([_LONG_TEXT] * _TEXTS_OF_LONG_REQUESTS, "cross_entropy")]
    numbers = []
    for _ in range(NUM_WAITING):
        # Their numbers begin with 1.
        numbers.append(Run.of(training).sent + 1)
        sent += [training.forward_backward([a_datum()], "cross_entropy")]
        sent += [training.optim_step(ADAM)]
    killed = Run.of(training)
    wait_until(
        lambda: vars(training)["_turn_counter"] == killed.sent, "the confirmation of all requests"
    )
    _kill(server)
    later = f"{_autosave(killed, STEPS + 1)}/manifest.json"
    assert later not in bucket.names(STORE), "the head was faster than this program"
    return Expected(
        release=release,
        idle=idle,
        killed=killed,
        waiting=[f"{killed.model_id}:{number}" for number in numbers],
        autosave=_autosave(idle, STEPS).replace("runs/", "tinker://"),
        next_losses=next_losses,
    )


def _a_run(server: Server) -> tinker.TrainingClient:
    """Train `STEPS` steps, always the same."""
    training = server.client().create_lora_training_client(MODEL, rank=2, seed=1).result()
    for _ in range(STEPS):
        step(training)
    return training


def _autosave(run: Run, steps: int) -> str:
    """Return the folder of an automatic checkpoint in the store."""
    return f"runs/{run.model_id}/weights/autosave-step-{steps:06d}"


def _kill(server: Server) -> None:
    # In this order, because a server starts a killed head again.
    server.kill()
    server.kill_heads()
    server.clients.close()


if __name__ == "__main__":
    made = make(Path(sys.argv[1]), *map(Path, sys.argv[2:]))
    sys.stdout.write(f"{made}\n")
    sys.stdout.flush()
    # Clients that wait for a killed server do not end by themselves.
    os.kill(os.getpid(), signal.SIGKILL)
