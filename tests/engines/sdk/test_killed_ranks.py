"""A trainer on two ranks with the real SDK: failures after kill -9."""

import time
from collections.abc import Iterator

import psutil
import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum
from tinkercloud_testing.serving.servers import TRAINERS, Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tiny/llama"
PATIENCE = 300
"""Timeout of a result in seconds; a new group of ranks has to load the model."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
    state_dir = tmp_path_factory.mktemp("state")
    with a_server(state_dir, {MODEL: folder}, TRAINERS["megatron-tp2"]) as running:
        yield running


def a_training_client(server: Server) -> tinker.TrainingClient:
    client = server.client()
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result(PATIENCE)


def step(training: tinker.TrainingClient) -> float:
    result = training.forward_backward([a_datum()], "cross_entropy")
    training.optim_step(ADAM).result(timeout=PATIENCE)
    return result.result(timeout=PATIENCE).metrics["loss:sum"]


def below_the_head(server: Server) -> list[psutil.Process]:
    (pid,) = server.head_pids()
    children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return children


def ranks(server: Server) -> list[psutil.Process]:
    return [p for p in below_the_head(server) if "".join(p.cmdline()[:1]).startswith("ray::Rank")]


def test_a_rank_killed_in_a_step_fails_it_definitely_and_training_continues_bit_for_bit(
    server: Server,
) -> None:
    uninterrupted, other = a_training_client(server), a_training_client(server)
    expected = [step(uninterrupted) for _ in range(4)]
    training = a_training_client(server)
    losses = [step(training) for _ in range(2)]
    other.forward_backward([a_datum()], "cross_entropy").result(timeout=PATIENCE)
    first_group = ranks(server)

    # The other rank waits for the suspended one.
    first_group[1].suspend()
    passed = training.forward_backward([a_datum()], "cross_entropy")
    applied = training.optim_step(ADAM)
    time.sleep(1)
    first_group[1].kill()

    with pytest.raises(tinker.RequestFailedError, match=r"its process ended; .* again") as failure:
        passed.result(timeout=PATIENCE)
    assert failure.value.category.value == "server"
    with pytest.raises(tinker.RequestFailedError, match="not applied"):
        applied.result(timeout=PATIENCE)
    assert losses + [step(training) for _ in range(2)] == expected
    with pytest.raises(tinker.RequestFailedError, match=r"its process ended; .* again"):
        other.optim_step(ADAM).result(timeout=PATIENCE)
    assert [step(other) for _ in range(2)] == expected[:2]
    assert not psutil.wait_procs(first_group, timeout=PATIENCE)[1]
    assert len(ranks(server)) == 2


@pytest.mark.long
def test_a_run_whose_ranks_are_all_killed_is_lost_and_names_the_checkpoint_to_resume_from(
    server: Server,
) -> None:
    training = a_training_client(server)
    step(training)
    path = training.save_state("one").result(timeout=PATIENCE).path
    expected = step(training)

    for rank in ranks(server):
        rank.kill()

    with pytest.raises(tinker.RequestFailedError, match="ranks that held it ended") as lost:
        training.forward_backward([a_datum()], "cross_entropy").result(timeout=PATIENCE)
    assert f"create_training_client_from_state_with_optimizer('{path}')" in str(lost.value)
    client = server.client()
    resumed = client.create_training_client_from_state_with_optimizer(path).result(PATIENCE)
    assert step(resumed) == expected


def test_neither_ranks_nor_their_cluster_outlive_a_killed_head(server: Server) -> None:
    step(a_training_client(server))
    # Ray's agents exit too, but first try for a minute to report to the store of the killed
    # cluster.
    processes = [p for p in below_the_head(server) if not p.cmdline()[0].endswith("Agent")]
    assert {"gcs_server", "raylet"} < {p.name() for p in processes}
    assert len(ranks(server)) == 2

    server.kill_heads()

    assert not psutil.wait_procs(processes, timeout=PATIENCE)[1]
