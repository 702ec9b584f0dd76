"""The SDK's metrics of expert load match the choices of routers."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_testing.serving.bare_heads import a_head
from tinkercloud_testing.small_models.data import a_datum, a_request, random_data
from tinkercloud_testing.small_models.models import (
    tiny_deepseek_v3,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.expert_load import TokenCounts, balance_metrics
from tinkercloud_worker.engine.trainer import TrainingPass
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

LORA = LoraConfig(rank=4, seed=1)
DATA = random_data([5, 17, 9])
MIXTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": tiny_qwen3_moe,
    "mixtral": tiny_mixtral,
    "deepseek": tiny_deepseek_v3,
}


def chosen_by(model: PreTrainedModel, data: list[Datum]) -> TokenCounts:
    """Return what every router of a model chooses, each example read by itself."""
    counts: dict[str, np.ndarray] = {}

    def note(name: str, experts: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        number = cast("int", experts.num_experts)
        counts[name] = counts.get(name, np.zeros(number, np.int64)) + np.bincount(
            inputs[1].flatten().numpy(), minlength=number
        )

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda m, x, name=name: note(name, m, x))
    for datum in data:
        model(input_ids=torch.tensor(datum.tokens[None].astype(np.int64)))
    return np.stack(list(counts.values()))


def a_trainer(model: PreTrainedModel, *models: LoraConfig | None, kept: int | None) -> TorchTrainer:
    trainer = TorchTrainer(TorchBaseModel(model), max_batch_tokens=64, max_kept_tokens=kept)
    for number, config in enumerate(models):
        trainer.add_model(f"m{number}", config)
    return trainer


@pytest.mark.parametrize("kept", [None, 0], ids=["kept", "recomputed"])
@pytest.mark.parametrize("config", [LORA, None], ids=["an adapter", "a whole model"])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_token_is_counted_once_for_each_expert_it_is_sent_to(
    name: str, config: LoraConfig | None, kept: int | None
) -> None:
    expected = chosen_by(MIXTURES[name]().eval(), DATA)
    trainer = a_trainer(MIXTURES[name](), config, kept=kept)
    batch = prepare(a_request(DATA), trainer.limits)

    # A fresh adapter is the base, as a whole model is.
    for method in (trainer.forward, trainer.forward_backward, trainer.forward):
        np.testing.assert_array_equal(method("m0", batch).expert_tokens, expected)


def test_models_that_share_a_pass_have_their_own_counts() -> None:
    trainer = a_trainer(tiny_qwen3_moe(), LORA, LORA, kept=None)
    batches = [prepare(a_request(data), trainer.limits) for data in (DATA[:1], DATA[1:])]
    passes = [TrainingPass(f"m{number}", batch) for number, batch in enumerate(batches)]
    assert trainer.can_batch(passes[:1], passes[1])

    together = trainer.run_batch(passes, lambda: None)

    for output, data in zip(together, (DATA[:1], DATA[1:]), strict=True):
        expected = chosen_by(tiny_qwen3_moe().eval(), data)
        np.testing.assert_array_equal(output.expert_tokens, expected)


def test_a_model_without_experts_has_no_counts_and_no_metrics_of_them() -> None:
    output = run(a_trainer(tiny_llama(), LORA, kept=None), DATA, model_id="m0")

    assert output.expert_tokens is None
    assert balance_metrics(None) == {}


async def test_metrics_count_only_the_experts_of_a_requests_own_tokens(
    tmp_path: Path,
) -> None:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1", make=tiny_qwen3_moe) as head:
        await head.begin()
        head.add(1)
        metrics = pb.ForwardBackwardOutput.FromString(await head.answer(1)).metrics

    counts = chosen_by(tiny_qwen3_moe().eval(), [a_datum([5, 6, 7])])
    for name, value in balance_metrics(counts).items():
        assert metrics[name] == pytest.approx(value)


def test_metrics_are_those_the_sdk_describes() -> None:
    # Fair shares are 3 and 2.
    counts = np.array([[9, 3, 0, 0], [2, 2, 2, 2]])

    assert balance_metrics(counts) == pytest.approx(
        {
            "e_frac_with_tokens:mean": (0.5 + 1) / 2,
            "e_frac_oversubscribed:mean": (0.25 + 0) / 2,
            "e_max_violation:mean": (2 + 0) / 2,
            "e_max_violation:max": 2,
            "e_min_violation:mean": (-1 + 0) / 2,
        }
    )
