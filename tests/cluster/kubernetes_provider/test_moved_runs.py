"""Runs that are moved between pool clusters while they are used: real SDK, real heads.

The test takes the role of the operator.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from threading import Event

import pytest
import tinker
from tinker import types

from tinkercloud_testing.cluster.provider_world import Head, World, a_base_model
from tinkercloud_testing.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.servers import Server
from tinkercloud_testing.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

MODEL = "tiny/moved"
PROMPT = types.ModelInput.from_ints([5, 6, 7])
AHEAD = 4
"""Steps that a client sends before it waits for a result."""


@dataclass
class Pool:
    """A pool with two clusters that are ready."""

    world: World
    heads: dict[str, Head] = field(default_factory=dict)

    def a_run(self, server: Server, cluster: str) -> tuple[tinker.TrainingClient, str]:
        """Create a run on a cluster; return it and its TrainingSession."""
        known = self.world.sessions()
        waiting = server.client().create_lora_training_client(MODEL, rank=4, seed=1)
        session = self.world.new_session(known)
        self.world.place(session, cluster)
        return waiting.result(), session

    def move(self, run: tinker.TrainingClient, session: str, source: str, target: str) -> None:
        self.world.move(session, run.model_id, self.heads[source], target)


@pytest.fixture(scope="module")
def pool(world: World) -> Iterator[Pool]:
    shared = a_base_model("moved", world.namespace, MODEL)
    shared["spec"] |= {"sharing": "Shared", "pool": {"slotsPerCluster": 8}}
    world.cluster.apply(shared)
    made = Pool(world)
    for name in ("pool-left", "pool-right"):
        made.heads[name] = world.a_head(MODEL)
        world.a_pool_cluster(name, made.heads[name])
    yield made
    world.cluster.delete("basemodel", "moved", world.namespace)


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


def test_a_run_that_is_moved_in_a_pipelined_loop_has_the_same_curve_to_the_bit(
    pool: Pool, server: Server
) -> None:
    run, session = pool.a_run(server, "pool-left")
    has_started, has_moved = Event(), Event()

    def until_moved() -> Iterator[int]:
        for index in count():
            yield index
            has_started.set()
            if has_moved.is_set():
                return

    with ThreadPoolExecutor() as threads:
        training = threads.submit(pipelined, run, until_moved())
        assert has_started.wait(PATIENCE_SECONDS)
        pool.move(run, session, "pool-left", "pool-right")
        pool.move(run, session, "pool-right", "pool-left")
        has_moved.set()
        losses = training.result()

    undisturbed, _ = pool.a_run(server, "pool-left")
    assert losses == pipelined(undisturbed, range(len(losses)))
    assert losses[-1] < losses[0]


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
    pool.heads["pool-left"].give_away(run.model_id)

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(lambda: run.save_state("kept").result().path)
        world.annotate_moving(session, "pool-right")
        world.finish_move(session, "pool-right")

        assert waiting.result() == f"tinker://{run.model_id}/weights/kept"
