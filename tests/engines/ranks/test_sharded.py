"""The torch trainer at ranks that hold the base between them, against itself at one rank."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.training import AdamParams, LoraConfig
from tinkercloud_testing.data import a_datum, a_request, random_data
from tinkercloud_testing.models import tiny_llama
from tinkercloud_testing.ranks import BATCH_TOKENS, MeasuredTrainer
from tinkercloud_worker.actors.group import GroupShape, RankGroup
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.base_model import BaseModel
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module", params=[None, 0], ids=["activations kept", "computed again"])
def trainers(request, cluster) -> Iterator[tuple[RankedTrainer, TorchTrainer]]:
    factory = partial(MeasuredTrainer, request.param)
    sharded = RankedTrainer(lambda: RankGroup(GroupShape(ranks=2), factory))
    yield sharded, TorchTrainer(BaseModel(tiny_llama()), max_batch_tokens=BATCH_TOKENS)
    sharded.close()


def run(trainer, data):
    batch = prepare(a_request(data), trainer.limits)
    return trainer.forward_backward("m", batch, lambda: None)


@pytest.mark.parametrize("lengths", [[5, 20, 3, 11, 8], [9], [30, 1, 28, 30]], ids=str)
def test_logprobs_and_gradients_equal_one_ranks_however_unequal_the_shares(
    trainers, lengths
) -> None:
    for trainer in trainers:
        trainer.add_model("m", LORA)
        run(trainer, random_data([4, 6], seed=9))
        trainer.optim_step("m", ADAM)

    got, expected = (run(trainer, random_data(lengths, seed=1)) for trainer in trainers)

    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )
    gradients = [trainer.export_gradient("m") for trainer in trainers]
    for name, theirs in gradients[1].items():
        error = (gradients[0][name] - theirs).norm() / theirs.norm()
        assert error <= 1e-4, f"{name}: relative error {error:.2e}"


def test_an_example_without_weight_at_one_rank_holds_nobody_up(trainers) -> None:
    data = [a_datum([1, 2, 3], weights=np.zeros(3, np.float32)), a_datum([4, 5, 6, 7])]
    for trainer in trainers:
        trainer.add_model("m", LORA)

    got, expected = (run(trainer, data) for trainer in trainers)

    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
    steps = [trainer.optim_step("m", ADAM) for trainer in trainers]
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)


def test_scoring_changes_nothing_and_an_empty_share_is_scored_along(trainers) -> None:
    sharded, _ = trainers
    sharded.add_model("m", LORA)

    batch = prepare(a_request(random_data([9])), sharded.limits)
    output = sharded.forward("m", batch, lambda: None)

    assert [len(logprobs) for logprobs in output.logprobs] == [9]
    assert sharded.export_gradient("m") is None


def test_each_rank_holds_its_part_of_the_layers_only(trainers) -> None:
    sharded, single = trainers
    weights = single._base.named_weights()
    layers = sum(weight.numel() for name, weight in weights.items() if ".layers." in name)

    held = sharded._group.call_each("layer_elements", [(), ()])

    assert sum(held) == layers
    assert max(held) - min(held) <= layers // 100


def test_full_fine_tuning_is_refused(trainers) -> None:
    with pytest.raises(InvalidRequest, match="whole copy of the base at each rank"):
        trainers[0].add_model("m", None)
