"""Runs that are moved between pool clusters while they are used: real SDK, real heads.

Tests take the role of the operator, or run its worker of pools.
"""

import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Event

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.cluster.controllers.pool_worker import a_pool_worker
from tinkercloud_testing.cluster.provider_world import Head, World, a_base_model
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until
from tinkercloud_testing.serving.servers import Server

pytestmark = pytest.mark.slow

MODEL = "tiny/moved"
PROMPT = types.ModelInput.from_ints([5, 6, 7])
NUM_RUNS = 20
AHEAD = 4
"""Steps that a client sends before it waits for a result."""


@dataclass
class Pool:
    """A pool with two clusters that are ready."""

    world: World
    model_name: str
    heads: dict[str, Head]

    def a_run(self, server: Server, cluster: str) -> tuple[tinker.TrainingClient, str]:
        """Create a run on a cluster; return it and its TrainingSession."""
        self.world.wait_for_model(server, self.model_name)
        known = self.world.sessions()
        waiting = server.client().create_lora_training_client(self.model_name, rank=4, seed=1)
        session = self.world.new_session(known)
        self.world.place(session, cluster)
        return waiting.result(), session

    def move(self, run: tinker.TrainingClient, session: str, source: str, target: str) -> None:
        self.world.move(session, run.model_id, self.heads[source], target)


@pytest.fixture(scope="module")
def pool(world: World) -> Iterator[Pool]:
    heads = {name: world.a_head(MODEL) for name in ("pool-left", "pool-right")}
    with a_pool(world, MODEL, heads) as made:
        yield made


@contextmanager
def a_pool(world: World, model_name: str, heads: dict[str, Head]) -> Iterator[Pool]:
    """Make a pool of clusters with the given heads, all ready."""
    base_model = model_name.rpartition("/")[2]
    shared = a_base_model(base_model, world.namespace, model_name)
    shared["spec"] |= {"sharing": "Shared", "pool": {"slotsPerCluster": 64, "maxClusters": 8}}
    world.cluster.apply(shared)
    for name, head in heads.items():
        world.a_pool_cluster(name, head)
    yield Pool(world, model_name, heads)
    world.cluster.delete("basemodel", base_model, world.namespace)


def pipelined(training: tinker.TrainingClient, steps: Iterable[int]) -> list[float]:
    """Train with several steps in flight; return the losses."""
    losses: list[float] = []
    waiting = []
    for index in steps:
        waiting.append(training.forward_backward([a_datum(5 + index % 3)], "cross_entropy"))
        _applied = training.optim_step(ADAM)
        if len(waiting) > AHEAD:
            losses.append(waiting[len(losses)].result().metrics["loss:sum"])
    return losses + [each.result().metrics["loss:sum"] for each in waiting[len(losses) :]]


def until(has_started: Event, is_over: Event) -> Iterator[int]:
    """Count steps until an event has happened."""
    for index in count():
        yield index
        has_started.set()
        if is_over.is_set():
            return


def test_a_run_that_is_moved_in_a_pipelined_loop_has_the_same_curve_to_the_bit(
    pool: Pool, server: Server
) -> None:
    run, session = pool.a_run(server, "pool-left")
    has_started, has_moved = Event(), Event()

    with ThreadPoolExecutor() as threads:
        training = threads.submit(pipelined, run, until(has_started, has_moved))
        try:
            assert has_started.wait(PATIENCE_SECONDS)
            pool.move(run, session, "pool-left", "pool-right")
            pool.move(run, session, "pool-right", "pool-left")
        finally:
            has_moved.set()
        losses = training.result()

    undisturbed, _ = pool.a_run(server, "pool-left")
    assert losses == pipelined(undisturbed, range(len(losses)))
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_a_run_that_returns_because_its_target_was_lost_has_the_same_curve_to_the_bit(
    pool: Pool, world: World, server: Server
) -> None:
    run, session = pool.a_run(server, "pool-left")
    has_started, has_returned = Event(), Event()

    with ThreadPoolExecutor() as threads:
        training = threads.submit(pipelined, run, until(has_started, has_returned))
        try:
            assert has_started.wait(PATIENCE_SECONDS)
            world.annotate_moving(session, "pool-lost")
            pool.heads["pool-left"].give_away(run.model_id)
            world.annotate_moving(session, "pool-left")
            pool.heads["pool-left"].take_back(run.model_id)
            world.finish_move(session, "pool-left")
        finally:
            has_returned.set()
        losses = training.result()

    undisturbed, _ = pool.a_run(server, "pool-left")
    assert losses == pipelined(undisturbed, range(len(losses)))


def test_the_unsaved_weights_of_a_run_are_sampled_the_same_after_it_was_moved(
    pool: Pool, server: Server
) -> None:
    run, session = pool.a_run(server, "pool-left")
    step(run)
    sampler = run.save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(PROMPT).result()

    pool.move(run, session, "pool-left", "pool-right")

    assert sampler.compute_logprobs(PROMPT).result() == before


def test_a_request_that_reaches_the_old_cluster_waits_until_the_new_place_is_known(
    pool: Pool, world: World, server: Server
) -> None:
    run, session = pool.a_run(server, "pool-left")
    # In the order of the operator: until a move is announced, a head may take back a run.
    world.annotate_moving(session, "pool-right")
    pool.heads["pool-left"].give_away(run.model_id)

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(lambda: run.save_state("kept").result().path)
        world.finish_move(session, "pool-right")

        assert waiting.result() == f"tinker://{run.model_id}/weights/kept"


def test_the_runs_of_a_drained_cluster_are_moved_and_it_is_deleted_while_they_train(
    pool: Pool, world: World, server: Server
) -> None:
    run, session = pool.a_run(server, "pool-left")
    has_started, has_moved = Event(), Event()

    with a_pool_worker(world.cluster.kubeconfig, world.namespace), ThreadPoolExecutor() as threads:
        training = threads.submit(pipelined, run, until(has_started, has_moved))
        try:
            assert has_started.wait(PATIENCE_SECONDS)
            world.drain("pool-left")
            wait_until(lambda: "pool-left" not in world.sessions(), "the cluster to end")
        finally:
            has_moved.set()
        losses = training.result()

        assert world.session(session)["spec"]["poolCluster"] == "pool-right"
        undisturbed = server.client().create_lora_training_client(MODEL, rank=4, seed=1).result()
        assert losses == pipelined(undisturbed, range(len(losses)))


@pytest.mark.long
def test_twenty_runs_of_a_killed_cluster_resume_elsewhere_from_their_last_checkpoints(
    pool: Pool, world: World, server: Server
) -> None:
    doomed = world.a_head(MODEL)
    pool.heads["pool-doomed"] = doomed
    world.a_pool_cluster("pool-doomed", doomed)
    runs = [pool.a_run(server, "pool-doomed")[0] for _ in range(NUM_RUNS)]
    expected = []
    for index, run in enumerate(runs):
        step(run, index)
        run.save_state("safe").result()
        expected.append(step(run, index))

    doomed.kill()
    world.cluster.delete("trainingsession", "pool-doomed", world.namespace)

    with a_pool_worker(world.cluster.kubeconfig, world.namespace):
        resumed = []
        for run in runs:
            with pytest.raises((tinker.TinkerError, ValueError), match="is lost") as lost:
                step(run)
            named = re.search(r"tinker://[^'\"]+", str(lost.value))
            assert named is not None
            assert named[0] == f"tinker://{run.model_id}/weights/safe"
            client = server.client()
            again = client.create_training_client_from_state_with_optimizer(named[0]).result()
            resumed.append(again)
        losses = [step(run, index) for index, run in enumerate(resumed)]

    assert losses == expected


@pytest.mark.long
def test_twenty_runs_of_a_lost_cluster_continue_elsewhere_if_their_journals_are_in_the_store(
    world: World, server: Server
) -> None:
    name = "tiny/remote"
    heads = {f"remote-{each}": world.a_head(name, "remote") for each in ("lost", "safe")}
    with a_pool(world, name, heads) as pool:
        runs = [pool.a_run(server, "remote-lost")[0] for _ in range(NUM_RUNS)]
        losses = [[step(run, 5 + index % 3) for _ in range(3)] for index, run in enumerate(runs)]

        heads["remote-lost"].kill()
        shutil.rmtree(heads["remote-lost"].folder)
        world.cluster.delete("trainingsession", "remote-lost", world.namespace)
        with a_pool_worker(world.cluster.kubeconfig, world.namespace):
            for index, run in enumerate(runs):
                losses[index].append(step(run, 5 + index % 3))

        undisturbed = [pool.a_run(server, "remote-safe")[0] for _ in range(3)]
        expected = [
            [step(run, 5 + index) for _ in range(4)] for index, run in enumerate(undisturbed)
        ]
        assert losses == [expected[index % 3] for index in range(NUM_RUNS)]
