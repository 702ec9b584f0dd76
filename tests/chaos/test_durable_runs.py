"""kill -9 of heads and servers during pipelined training: the loop continues undisturbed.

With `remote`, the local journals are deleted with each kill. `make test-kills` runs it with 100
kills at seeded moments.
"""

import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.training_loops import Loop
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"
KILLS = int(os.environ.get("TINKERCLOUD_TEST_KILLS", "2"))
SEED = int(os.environ.get("TINKERCLOUD_TEST_SEED", "1"))
SETTINGS = {
    "TINKERCLOUD_DURABILITY__SNAPSHOT_STEPS": "20",
    "TINKERCLOUD_DURABILITY__WHOLE_MODEL_SECONDS": "0.5",
    "TINKERCLOUD_AUTOSAVE__STEPS": "0",
}

pytestmark = pytest.mark.timeout(600 + 60 * KILLS)


@pytest.fixture(scope="module", params=["local", pytest.param("remote", marks=pytest.mark.long)])
def server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """Run one server for all tests of a level: each test restarts what it has killed."""
    folder = tmp_path_factory.mktemp("state")
    settings = SETTINGS | {"TINKERCLOUD_DURABILITY__LEVEL": request.param}
    with a_server(folder, {MODEL: model_folder}, settings) as running:
        yield running


def kill_heads(server: Server) -> None:
    """Kill all heads; with `remote`, their disk is lost too."""
    journals = list(server.state_dir.glob("heads/*/journals"))
    assert journals
    server.kill_heads()
    if server.settings["TINKERCLOUD_DURABILITY__LEVEL"] == "remote":
        # The next head is still loading its base model.
        for each in journals:
            shutil.rmtree(each)


def a_training_client(server: Server, rank: int = 4) -> tinker.TrainingClient:
    """Create a model; one of rank 0 is a whole one."""
    client = server.client()
    return client.create_lora_training_client(base_model=MODEL, rank=rank, seed=1).result()


class Killer:
    """Kills a head, or a server, or both, at seeded moments."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._random = random.Random(SEED)
        self.num_kills = 0
        self.is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        for _ in range(KILLS):
            if self.is_stopped.wait(self._random.uniform(0.05, 1.5)):
                return
            killed = self._kill()
            self._wait_until_replaced(killed)

    def _kill(self) -> int:
        victims = self._random.choice(["head", "head", "both"])
        if victims == "both":
            self._server.kill()
        (pid,) = self._server.head_pids()
        kill_heads(self._server)
        self.num_kills += 1
        if victims == "both":
            self._server.start()
        return pid

    def _wait_until_replaced(self, killed: int) -> None:
        """Return once another head is ready, which may still be repeating steps."""
        while self._server.head_pids() in ([], [killed]):
            if self.is_stopped.wait(0.05):
                return

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self.is_stopped.set()
        self._thread.join()


@pytest.mark.parametrize(
    "rank",
    [
        pytest.param(4, id="an adapter"),
        pytest.param(0, id="a whole model", marks=pytest.mark.long),
    ],
)
def test_a_pipelined_loop_is_the_same_to_the_bit_however_often_its_head_is_killed(
    server: Server, rank: int
) -> None:
    disturbed = Loop(a_training_client(server, rank))
    killer = Killer(server)
    try:
        while killer.is_alive:
            disturbed.run(10)
        disturbed.run(10)
    finally:
        killer.stop()

    assert killer.num_kills == KILLS
    undisturbed = Loop(a_training_client(server, rank)).run(len(disturbed.curve))
    assert [number for _, number in disturbed.curve] == list(range(1, len(disturbed.curve) + 1))
    assert disturbed.curve == undisturbed


def test_unnamed_samplers_and_their_requests_survive_a_killed_head(server: Server) -> None:
    training = a_training_client(server)
    Loop(training).run(3)
    sampler = training.save_weights_and_get_sampling_client().result()
    text = types.ModelInput.from_ints([5, 6, 7])
    before = sampler.compute_logprobs(text).result()
    params = types.SamplingParams(max_tokens=100, stop=[], seed=1)
    expected = [each.tokens for each in sampler.sample(text, 2, params).result().sequences]
    Loop(training).run(1)

    futures = [sampler.sample(text, 2, params) for _ in range(4)]
    kill_heads(server)

    for future in futures:
        assert [each.tokens for each in future.result().sequences] == expected
    assert sampler.compute_logprobs(text).result() == before
