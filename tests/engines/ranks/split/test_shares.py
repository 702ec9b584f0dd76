"""Models that leave their ranks in shares: each rank exports its own part, and no rank the rest."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray
import torch

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import StateLost, Unavailable
from tinkercloud_testing.ranks.megatron import megatron_factory
from tinkercloud_testing.ranks.ranks import (
    BATCH_TOKENS,
    MeasuredTrainer,
    TrainerOf,
    actors_of,
    often,
)
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import save, tiny_qwen3
from tinkercloud_testing.training.trainers import assert_equal, run
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup, RanksLost
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.actors.shares import Shares
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.ranks import Outline
from tinkercloud_worker.engine.tensor_slices import Piece, joined
from tinkercloud_worker.engine.trainer import DirectTrainer, TrainingState
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.adam import AdamTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

ADAM = AdamParams(learning_rate=1e-2)
SHAPES = ("torch 2", "torch 4", "megatron tp2 pp2")
OFTEN = ("torch 2", "megatron tp2 pp2")
"""The shapes that CI tries; `make test-long` tries the others."""


@dataclass(frozen=True)
class Divided:
    """A whole model with tied embeddings that ranks hold in parts, and the state they got."""

    ranked: RankedTrainer
    state: TrainingState
    most: float
    """The largest part of the model that one rank exports."""

    @property
    def group(self) -> RankGroup:
        """The ranks."""
        return self.ranked.group.current


def step(trainer: DirectTrainer, seed: int) -> float:
    output = run(trainer, random_data([5, 9, 3], seed=seed))
    trainer.optim_step("m", ADAM)
    return output.metrics["loss:sum"]


def a_whole_model() -> TorchTrainer:
    """Return a trainer, on this process alone, of a model after two steps."""
    trainer = TorchTrainer(TorchBaseModel(tiny_qwen3()), max_batch_tokens=BATCH_TOKENS)
    trainer.add_model("m", None)
    for seed in range(2):
        step(trainer, seed)
    return trainer


@pytest.fixture(scope="module")
def state() -> TrainingState:
    return a_whole_model().export_state("m")


@pytest.fixture(scope="module", params=often(SHAPES, OFTEN))
def divided(
    request: pytest.FixtureRequest,
    state: TrainingState,
    trainer_of: TrainerOf,
    tmp_path_factory: pytest.TempPathFactory,
) -> Divided:
    kind, number, *_ = request.param.split()
    if kind == "torch":
        ranks, most = int(number), 1 / int(number)
        factory: Callable[[], AdamTrainer] = partial(MeasuredTrainer, make=tiny_qwen3)
    else:
        # The embeddings are on the first stage only.
        ranks, most = 4, 0.4
        folder = save(tiny_qwen3(), tmp_path_factory.mktemp("model"))
        factory = megatron_factory(str(folder), tensor=2, pipeline=2)
    ranked = trainer_of(ranks, factory)
    ranked.add_model("m", None)
    return Divided(ranked, state, most)


@pytest.fixture(autouse=True)
def given(request: pytest.FixtureRequest) -> None:
    """Give the ranks the state again, which other tests have changed."""
    if "divided" in request.fixturenames:
        divided: Divided = request.getfixturevalue("divided")
        divided.ranked.import_state("m", divided.state)


def tensors_of(state: TrainingState) -> dict[str, torch.Tensor]:
    return {**state.weights.tensors, **(state.moments or {})}


def pieces_of(parts: list[Any]) -> list[Piece]:
    return [piece for part in parts for piece in ray.get(part)]


def test_what_all_ranks_export_is_the_state_that_they_were_given_each_element_once(
    divided: Divided,
) -> None:
    size = sum(each.nbytes for each in tensors_of(divided.state).values())

    shares = divided.group.call_in_parts("share_state", "m")

    of_ranks = [pieces_of(parts) for _, parts in shares]
    sizes = [sum(piece.values.nbytes for piece in pieces) for pieces in of_ranks]
    assert sum(sizes) == Shares.of(shares).size_bytes == size
    assert max(sizes) <= divided.most * size
    whole = joined(piece for pieces in of_ranks for piece in pieces)
    assert_equal(whole, tensors_of(divided.state), atol=0)
    assert [outline.step for outline, _ in shares] == [2] * len(shares)


def test_a_rank_exports_its_share_while_no_other_takes_part(divided: Divided) -> None:
    *_, (_, expected) = divided.group.call_in_parts("share_state", "m")
    last: Any = actors_of(divided.group)[-1].call_in_parts

    stream = last.options(num_returns="streaming").remote("share_state", ("m",))
    ray.get(stream.completed(), timeout=120)

    *parts, _ = stream
    for ours, theirs in zip(pieces_of(parts), pieces_of(expected), strict=True):
        assert ours.block == theirs.block
        assert torch.equal(ours.values, theirs.values)


def test_a_copy_that_was_started_before_a_step_does_not_have_it(divided: Divided) -> None:
    take = divided.ranked.begin_export("m")
    step(divided.ranked, seed=2)

    before, after = take(), divided.ranked.export_state("m")

    assert_equal(tensors_of(before), tensors_of(divided.state), atol=0)
    assert (before.step, after.step) == (2, 3)
    assert not torch.equal(*(tensors_of(each)["model.norm.weight"] for each in (before, after)))


def test_ranks_write_the_files_of_one_rank(divided: Divided) -> None:
    written = formats.encode_state(divided.ranked.begin_export("m")(), "tiny")

    assert written == formats.encode_state(divided.state, "tiny")


def test_a_model_continues_on_other_numbers_of_ranks_with_the_same_losses(
    trainer_of: TrainerOf, state: TrainingState
) -> None:
    losses: list[list[float]] = []
    for earlier, later in ((2, 4), (4, 2)):
        make = partial(MeasuredTrainer, make=tiny_qwen3)
        first = trainer_of(earlier, make)
        first.add_model("m", None)
        first.import_state("m", state)
        losses.append([step(first, seed) for seed in (2, 3)])
        second = trainer_of(later, make)
        second.add_model("m", None)
        second.import_state("m", first.export_state("m"))
        losses[-1] += [step(second, seed) for seed in (4, 5)]
    single = a_whole_model()
    expected = [step(single, seed) for seed in range(2, 6)]

    for each in losses:
        np.testing.assert_allclose(each, expected, rtol=1e-5)


def test_a_copy_outlives_the_ranks_that_made_it(cluster: None, state: TrainingState) -> None:
    make = partial(MeasuredTrainer, make=tiny_qwen3)
    ranked = RankedTrainer(lambda _: RankGroup(GroupShape(ranks=2), make))
    ranked.add_model("m", None)
    ranked.import_state("m", state)
    take = ranked.begin_export("m")
    ranked.group.current.call("die_in", "forward_backward", 1)
    with pytest.raises(StateLost, match="model m was lost"):
        step(ranked, seed=2)

    assert_equal(tensors_of(take()), tensors_of(state), atol=0)
    with pytest.raises(StateLost, match="model m was lost"):
        ranked.begin_export("m")
    ranked.close()


@pytest.mark.parametrize(
    ("method", "reason"),
    [("die_in", "its process ended"), ("fail_in", "MemoryError: no room for it")],
)
def test_a_rank_that_is_lost_while_it_exports_is_named(
    cluster: None, method: str, reason: str
) -> None:
    group = RankGroup(GroupShape(ranks=2), MeasuredTrainer)
    group.call("add_model", "m", None)
    group.call(method, "share_state", *([1] if method == "die_in" else []))

    with pytest.raises(RanksLost, match=rf"rank \d of 2 failed in share_state: {reason}"):
        group.call_in_parts("share_state", "m")

    assert not group.is_alive


class Unfinished:
    """An actor whose object never exists."""

    def part(self) -> None:
        """Wait for the end."""
        time.sleep(3600)


def test_a_copy_of_which_a_part_was_lost_says_so(cluster: None) -> None:
    actor: Any = ray.remote(num_cpus=0)(Unfinished).remote()
    shares = Shares(Outline(None, step=1, shared_bytes=0), 4, [actor.part.remote()])
    ray.kill(actor)

    with pytest.raises(Unavailable, match=r"lost before its part .* was read; send .* again"):
        shares.state()


@pytest.fixture
def adapter(cluster: None) -> Iterator[tuple[RankedTrainer, TrainingState]]:
    """Two ranks with the same adapter, and its state."""
    ranked = RankedTrainer(lambda _: RankGroup(GroupShape(ranks=2), MeasuredTrainer))
    ranked.add_model("m", LoraConfig(rank=2, seed=1))
    step(ranked, seed=1)
    yield ranked, ranked.export_state("m")
    assert not ranked.group.current.is_alive
    ranked.close()


def lose_first_rank(patch: pytest.MonkeyPatch, ranked: RankedTrainer, method: str) -> None:
    """Kill rank 0 before a method of `Shares` has read its parts, which are lost with it."""
    assemble = getattr(Shares, method)

    def assembled(shares: Shares) -> object:
        patch.setattr(Shares, method, assemble)
        ray.kill(actors_of(ranked.group.current)[0])
        raise Unavailable("a node of the trainer's ranks was lost")

    patch.setattr(Shares, method, assembled)


def test_weights_that_were_lost_with_the_first_rank_are_read_from_another(
    adapter: tuple[RankedTrainer, TrainingState], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked, expected = adapter
    lose_first_rank(monkeypatch, ranked, "weights")

    assert_equal(ranked.copy_weights("m").tensors, expected.weights.tensors, atol=0)


def test_a_state_that_was_lost_with_the_first_rank_can_be_exported_from_another(
    adapter: tuple[RankedTrainer, TrainingState], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked, expected = adapter
    lose_first_rank(monkeypatch, ranked, "state")

    with pytest.raises(Unavailable):
        ranked.begin_export("m")()
    again = ranked.begin_export("m")()

    assert_equal(tensors_of(again), tensors_of(expected), atol=0)
    assert again.step == 1
