"""Disks and stores that fail for a while during training: it continues, and nothing is lost.

The disk is real, and so is the S3 server. `make test-outages` lets the disk fail for a minute and
the store for ten, and shows how much memory the head has; the usual tests do so for a moment.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import psutil
import pytest

from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.storage.buckets import a_bucket
from tinkercloud_testing.storage.disks import CAN_MOUNT, a_disk

MODEL = "tiny/llama"
DISK_SECONDS = float(os.environ.get("TINKERCLOUD_TEST_DISK_SECONDS", "0"))
STORE_SECONDS = float(os.environ.get("TINKERCLOUD_TEST_STORE_SECONDS", "0"))
IS_LONG = DISK_SECONDS + STORE_SECONDS > 0
STEPS = 20 if IS_LONG else 3
"""Steps before an outage, and after it."""
STEPS_MEANWHILE = 160 if IS_LONG else 3
"""Steps during an outage; one that lasts longer has more."""
PAUSE_SECONDS = 0.2
"""Pause between the steps of an outage, so that a long one leaves the machine to others."""
WAITING_BYTES = 1 << 20
"""What may wait for a store that is away: a small part of what is sent in ten minutes."""
MORE_MEBIBYTES = 32
"""How much more memory a head may have while the store is away, also for other reasons."""

pytestmark = pytest.mark.timeout(600 + 3 * DISK_SECONDS + 3 * STORE_SECONDS)
BY_HAND = "takes minutes: make test-outages"


class Loop:
    """A training loop with other data in each step."""

    def __init__(self, server: Server, num_texts: int = 1) -> None:
        client = server.client()
        creation = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1)
        self.training = creation.result()
        self.num_texts = num_texts
        self.curve: list[tuple[float, float]] = []
        """Loss and number of each optimizer step."""

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self._step()

    def run_for(self, seconds: float) -> None:
        """Train for a time, and at least for `STEPS_MEANWHILE`."""
        end, last = time.monotonic() + seconds, len(self.curve) + STEPS_MEANWHILE
        self.run_until(lambda: time.monotonic() >= end and len(self.curve) >= last)

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Train until something is true."""
        while not reached():
            self._step()
            time.sleep(PAUSE_SECONDS)

    def _step(self) -> None:
        index = len(self.curve)
        data = [a_datum(5 + (index + each) % 11) for each in range(self.num_texts)]
        passed = self.training.forward_backward(data, "cross_entropy")
        applied = self.training.optim_step(ADAM).result()
        assert applied.metrics is not None
        self.curve.append((passed.result().metrics["loss:sum"], applied.metrics["step"]))


def durability(server: Server) -> str:
    return str(server.request("GET", "/api/v1/health").json()["durability"])


def reason(server: Server, loop: Loop) -> str:
    session = loop.training.holder.get_session_id()
    answer = server.request("GET", f"/api/v1/session_usage/{session}").json()
    (model,) = answer["models"]
    return str(model["degraded"])


def degraded_models(server: Server) -> float:
    return server.head_metric("tinkercloud_degraded_models")


def mebibytes(pid: int) -> int:
    """Return the resident memory of a process, in MiB."""
    return int(psutil.Process(pid).memory_info().rss) >> 20


def report(loop: Loop, words: str) -> None:
    """Show it with `-rP`."""
    sys.stdout.write(f"{len(loop.curve)} steps with equal losses; {words}\n")


def kill_with_disk(server: Server) -> None:
    """Kill the head, and delete its journals before the next one has loaded its model."""
    journals = list(server.state_dir.glob("heads/*/journals"))
    assert journals
    server.kill_heads()
    for each in journals:
        shutil.rmtree(each)


def assert_continues_to_the_bit(server: Server, loop: Loop) -> None:
    loop.run()
    undisturbed = Loop(server, loop.num_texts)
    undisturbed.run(len(loop.curve))
    assert [number for _, number in loop.curve] == list(range(1, len(loop.curve) + 1))
    assert loop.curve == undisturbed.curve


def assert_outlasts(server: Server, outage: AbstractContextManager[None], words: str) -> None:
    """Train before, during and after an outage of the disk, and then kill the head."""
    loop = Loop(server)
    loop.run()
    assert durability(server) == "local"

    with outage:
        loop.run_until(lambda: durability(server) == "degraded")
        loop.run_for(DISK_SECONDS)
        assert durability(server) == "degraded"
        assert words in reason(server, loop)
        assert degraded_models(server) == 1

    loop.run_until(lambda: durability(server) == "local")
    assert degraded_models(server) == 0
    server.kill_heads()
    assert_continues_to_the_bit(server, loop)
    report(loop, f"{words}: {DISK_SECONDS:g} s")


@pytest.mark.skipif(not DISK_SECONDS, reason=BY_HAND)
def test_training_outlasts_a_full_disk_with_all_state_of_the_server(
    tmp_path: Path, model_folder: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with (
        a_disk(tmp_path / "disk", state) as disk,
        a_server(state, {MODEL: model_folder}) as server,
    ):
        assert_outlasts(server, disk.full(), "No space left on device")


@pytest.mark.skipif(not CAN_MOUNT, reason="mounting a disk needs root and loop devices")
@pytest.mark.long
def test_training_outlasts_a_read_only_disk_with_the_journals(
    tmp_path: Path, model_folder: Path
) -> None:
    with ExitStack() as last, a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        wait_until(lambda: len(server.head_pids()) == 1, "a head")
        (journals,) = server.state_dir.glob("heads/*/journals")
        # It is unmounted after the server has stopped.
        disk = last.enter_context(a_disk(tmp_path / "disk", journals))
        assert_outlasts(server, disk.read_only(), "Read-only file system")


@pytest.mark.skipif(not STORE_SECONDS, reason=BY_HAND)
def test_training_outlasts_a_store_that_is_away_and_then_does_not_respond(
    tmp_path: Path, model_folder: Path
) -> None:
    with a_bucket("127.0.0.1") as bucket:
        settings = {
            **bucket.environment,
            "TINKERCLOUD_CHECKPOINT_ROOT": bucket.url("checkpoints"),
            "TINKERCLOUD_DURABILITY__LEVEL": "remote",
            "TINKERCLOUD_DURABILITY__STORE_TIMEOUT_SECONDS": "2",
            "TINKERCLOUD_DURABILITY__MAX_WAITING_BYTES": str(WAITING_BYTES),
            # Otherwise results of the last quarter of an hour are in the head's memory too.
            "TINKERCLOUD_TIMINGS__RESULT_TTL_SECONDS": "30",
        }
        with a_server(tmp_path, {MODEL: model_folder}, settings) as server:
            loop = Loop(server, num_texts=256)
            loop.run()
            assert durability(server) == "remote"
            (head,) = server.head_pids()
            memory = [mebibytes(head)]

            with bucket.away():
                loop.run_until(lambda: degraded_models(server) == 1)
                loop.run_for(STORE_SECONDS / 2)
                memory.append(mebibytes(head))
                with bucket.silent():
                    loop.run_for(STORE_SECONDS / 2)
                    memory.append(mebibytes(head))
                    assert durability(server) == "degraded"
                    assert "store" in reason(server, loop)
                    assert server.request("GET", "/readyz").status == 200
                    assert server.request("GET", "/healthz").status == 503
                    sent = server.head_metric("tinkercloud_journal_bytes_total") / 2**20

            loop.run_until(lambda: durability(server) == "remote")
            memory.append(mebibytes(head))
            kill_with_disk(server)
            assert_continues_to_the_bit(server, loop)
            report(loop, f"{sent:.0f} MiB of requests; MiB of the head's memory: {memory}")
            assert max(memory) - memory[0] < MORE_MEBIBYTES
