"""The megatron trainer on one rank, in this process, against the torch trainer and PEFT.

Full fine-tuning is compared with the torch trainer, which `unit/training` compares with Hugging
Face. Tolerances: logprobs 1e-5, gradients 1e-4 relative, losses of ten steps 1e-5 relative,
parameters after them 1e-3 relative.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.ranks.megatron import MegatronRank, lengthen_examples, megatron_trainer
from tinkercloud_testing.small_models.data import a_request, counting_every_token, random_data
from tinkercloud_testing.small_models.models import (
    save,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.small_models.wrong_folders import (
    SHARDS,
    UP,
    Fault,
    configured,
    expert,
    in_float8,
    indexed,
    lost,
    prefixed,
    shape,
    value,
    without_first_part,
)
from tinkercloud_testing.training.peft_twin import PeftTwin
from tinkercloud_testing.training.trainers import assert_close, gradient_of, run, ten_changing_steps
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.devices.select_device import device_of
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import blank
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    # megatron-core warns of its own defaults.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTHS = [5, 17, 3, 11]
LORA = LoraConfig(rank=4, seed=1)
ADAM = AdamParams(learning_rate=1e-2)
FIRST_BATCH = random_data([6, 9], seed=9)
FIRST_STEP = AdamParams(learning_rate=5e-2)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "tied llama": lambda: tiny_llama(tied=True),
    "llama 3": lambda: tiny_llama(rope=LLAMA3),
    "stretched by yarn": lambda: tiny_llama(rope=YARN),
    "stretched": lambda: tiny_llama(rope={"rope_type": "linear", "factor": 2.0}),
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "mistral": tiny_mistral,
}


def pair(
    make: Callable[[], PreTrainedModel], folder: Path, lora: LoraConfig = LORA
) -> tuple[MegatronRank, TorchTrainer]:
    """Return both trainers with the same adapter, whose B has moved off zero."""
    torch_trainer = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=32)
    torch_trainer.add_model("m", lora)
    run(torch_trainer, FIRST_BATCH)
    torch_trainer.optim_step("m", FIRST_STEP)
    megatron = megatron_trainer(str(save(make(), folder)), 1, 1)
    megatron.add_model("m", lora)
    megatron.import_state("m", torch_trainer.export_state("m"))
    return megatron, torch_trainer


@pytest.mark.parametrize("rope", [YARN, {"rope_type": "linear", "factor": 4.0}])
def test_examples_as_long_as_scaled_positions_allow_are_those_of_the_torch_trainer(
    alone: timedelta, tmp_path: Path, rope: dict[str, Any]
) -> None:
    def make() -> PreTrainedModel:
        model = tiny_llama(rope=rope)
        model.config.max_position_embeddings = 16
        return model

    megatron, torch_trainer = pair(make, tmp_path)
    data = random_data([64])

    assert megatron.limits.max_context_length == torch_trainer.limits.max_context_length == 64
    [got], [expected] = run(megatron, data).logprobs, run(torch_trainer, data).logprobs
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_loss_and_every_lora_gradient_equal_the_torch_trainers_and_pefts(
    alone: timedelta, tmp_path: Path, name: str
) -> None:
    megatron, torch_trainer = pair(MODELS[name], tmp_path)
    twin = PeftTwin(MODELS[name](), torch_trainer.copy_weights("m"))
    data = random_data(LENGTHS)

    got, expected, loss = run(megatron, data), run(torch_trainer, data), twin.backward(data)

    assert [len(logprobs) for logprobs in got.logprobs] == LENGTHS
    for logprobs in (expected.logprobs, twin.logprobs(data)):
        np.testing.assert_allclose(
            np.concatenate(got.logprobs), np.concatenate(logprobs), atol=1e-5
        )
    assert got.metrics == pytest.approx(expected.metrics, abs=1e-4)
    assert got.metrics["loss:sum"] == pytest.approx(loss, abs=1e-4)
    for gradient in (gradient_of(torch_trainer), twin.gradients()):
        assert_close(gradient_of(megatron), gradient, rtol=1e-4)


def test_logprobs_equal_huggingfaces_with_a_fresh_adapter(alone: timedelta, tmp_path: Path) -> None:
    megatron = megatron_trainer(str(save(tiny_qwen3(), tmp_path)), 1, 1)
    megatron.add_model("m", LORA)
    base = tiny_qwen3().eval()
    data = random_data(LENGTHS)

    batch = prepare(a_request(data), megatron.limits)
    output = megatron.forward("m", batch)

    for got, datum in zip(output.logprobs, data, strict=True):
        logits = base(torch.tensor(datum.tokens[None].astype(np.int64))).logits[0]
        targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
        expected = torch.log_softmax(logits.detach(), -1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert megatron.export_gradient("m") is None


@pytest.mark.parametrize("switch", ["train_attn", "train_mlp", "train_unembed"])
def test_adapters_of_some_layers_have_the_torch_trainers_gradients(
    alone: timedelta, tmp_path: Path, switch: str
) -> None:
    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    megatron, torch_trainer = pair(
        tiny_llama, tmp_path, LoraConfig(rank=4, seed=1, **{**off, switch: True})
    )
    data = random_data(LENGTHS)

    for trainer in (megatron, torch_trainer):
        run(trainer, data)

    assert_close(gradient_of(megatron), gradient_of(torch_trainer), rtol=1e-4)


def test_a_loss_over_whole_sequences_has_the_torch_trainers_gradient(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron, torch_trainer = pair(tiny_llama, tmp_path)
    data = counting_every_token(random_data(LENGTHS, policy=True))
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}

    for trainer in (megatron, torch_trainer):
        run(trainer, data, "gspo", bounds)

    assert_close(gradient_of(megatron), gradient_of(torch_trainer), rtol=1e-4)


def test_ten_steps_with_changing_hyperparameters_equal_the_torch_trainers_and_pefts(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron, torch_trainer = pair(tiny_qwen3, tmp_path)
    torch_trainer.add_model("fresh", LORA)
    twin = PeftTwin(tiny_qwen3(), torch_trainer.copy_weights("fresh"))
    twin.steps([(FIRST_BATCH, FIRST_STEP)])
    steps = ten_changing_steps(LENGTHS)

    losses = [twin.steps(steps)]
    for trainer in (megatron, torch_trainer):
        losses.append([])
        for data, params in steps:
            output = run(trainer, data)
            trainer.optim_step("m", params)
            losses[-1].append(output.metrics["loss:sum"])

    of_peft, of_megatron, of_torch = losses
    np.testing.assert_allclose(of_megatron, of_torch, rtol=1e-5)
    np.testing.assert_allclose(of_megatron, of_peft, rtol=1e-5)
    assert_close(
        megatron.copy_weights("m").tensors, torch_trainer.copy_weights("m").tensors, rtol=1e-3
    )


def test_gradients_add_up_over_requests_as_if_their_data_had_come_at_once(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron, _ = pair(tiny_llama, tmp_path)
    data = random_data(LENGTHS)
    gradients = []
    for requests in ([data], [data[:1], data[1:3], data[3:]]):
        for request in requests:
            run(megatron, request)
        gradients.append(gradient_of(megatron))
        megatron.discard_gradient("m")

    assert_close(gradients[1], gradients[0], rtol=1e-5)


def test_adapters_of_one_base_stay_apart_bit_for_bit(alone: timedelta, tmp_path: Path) -> None:
    megatron, _ = pair(tiny_llama, tmp_path)
    data = random_data(LENGTHS)
    megatron.add_model("other", LORA)
    before = megatron.copy_weights("other").tensors

    run(megatron, data)
    megatron.optim_step("m", ADAM)

    assert megatron.export_gradient("other") is None
    after = megatron.copy_weights("other").tensors
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_full_models_weights_are_huggingfaces_and_have_the_torch_trainers_gradients(
    alone: timedelta, tmp_path: Path, name: str
) -> None:
    megatron = megatron_trainer(str(save(MODELS[name](), tmp_path)), 1, 1)
    torch_trainer = TorchTrainer(TorchBaseModel(MODELS[name]()), max_batch_tokens=32)
    for trainer in (megatron, torch_trainer):
        trainer.add_model("m", None)
        run(trainer, random_data(LENGTHS))

    assert_close(
        megatron.copy_weights("m").tensors, torch_trainer.copy_weights("m").tensors, rtol=0
    )
    assert_close(gradient_of(megatron), gradient_of(torch_trainer), rtol=1e-4)


def test_a_full_model_leaves_the_base_and_its_adapters_alone(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron, _ = pair(tiny_llama, tmp_path)
    data = random_data(LENGTHS)
    megatron.add_model("m", None)
    megatron.add_model("other", LORA)
    batch = prepare(a_request(data), megatron.limits)
    before = megatron.forward("other", batch)

    run(megatron, data)
    megatron.optim_step("m", ADAM)

    after = megatron.forward("other", batch)
    trained = megatron.forward("m", batch)
    assert np.array_equal(np.concatenate(after.logprobs), np.concatenate(before.logprobs))
    assert not np.allclose(trained.logprobs[0], before.logprobs[0], atol=1e-3)


def test_an_adapters_state_is_rejected_for_a_full_model(alone: timedelta, tmp_path: Path) -> None:
    megatron, torch_trainer = pair(tiny_llama, tmp_path)
    megatron.add_model("full", None)

    with pytest.raises(InvalidRequest, match="checkpoint does not match this model"):
        megatron.import_state("full", torch_trainer.export_state("m"))


def test_a_family_it_does_not_know_is_rejected(alone: timedelta, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gpt2'.*backend torch"):
        megatron_trainer(str(save(tiny_gpt2(), tmp_path)), 1, 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rope": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"bias": True}, r"o_proj\.bias"),
        ({"activation": "gelu"}, "hidden_act.*gelu"),
    ],
)
def test_models_with_unsupported_settings_are_rejected(
    alone: timedelta, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    folder = str(save(tiny_llama(**options), tmp_path))

    with pytest.raises(UnsupportedModelError, match=f"{named}.*backend torch"):
        megatron_trainer(folder, 1, 1)


def test_embeddings_that_only_the_configuration_ties_are_rejected(
    alone: timedelta, tmp_path: Path
) -> None:
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    folder = str(save(model, tmp_path))

    with pytest.raises(UnsupportedModelError, match=r"tie_word_embeddings.*two different weights"):
        megatron_trainer(folder, 1, 1)


@pytest.mark.parametrize(
    ("changes", "parallelism", "message"),
    [
        ({"vocab_size": 263}, Parallelism(tensor=2), "vocab_size 263 .*tensor_parallel 2"),
        ({}, Parallelism(tensor=8), "num_attention_heads 4 .*tensor_parallel 8"),
        ({}, Parallelism(tensor=4), "num_key_value_heads 2 .*tensor_parallel 4"),
        (
            {"intermediate_size": 49},
            Parallelism(tensor=2),
            "intermediate_size 49 .*tensor_parallel 2",
        ),
        ({}, Parallelism(pipeline=4), "num_hidden_layers 2 .*pipeline_parallel 4"),
    ],
)
def test_a_model_that_ranks_cannot_shard_evenly_is_rejected_by_name(
    changes: dict[str, int], parallelism: Parallelism, message: str
) -> None:
    config = tiny_llama().config
    config.update(changes)

    with pytest.raises(UnsupportedModelError, match=message):
        blank(config, torch.float32, parallelism, Cpu())


@pytest.mark.parametrize(
    ("make", "fault", "message"),
    [
        (tiny_llama, lost(UP), f"missing in the files: {UP}"),
        (tiny_llama, lost("lm_head.weight"), "set tie_word_embeddings to true"),
        (tiny_qwen3, configured(tie_word_embeddings=False), "set tie_word_embeddings to true"),
        (tiny_llama, prefixed("_orig_mod."), r"start with '_orig_mod\.'"),
        (tiny_llama, configured(num_hidden_layers=1), "the files have layers up to 1"),
        (tiny_llama, configured(num_hidden_layers=3), r"layers \[2\] are missing"),
        (tiny_llama, shape("model.norm.weight", lambda w: w[:16]), r"model\.norm\.weight \[16\]"),
        (tiny_llama, value(UP, float("nan")), f"NaN or infinite values in .*{UP}"),
        (tiny_qwen3_moe, lost(expert(2)), re.escape(expert(2))),
        (
            tiny_qwen3_moe,
            value(expert(2), float("inf")),
            r"infinite values in .*experts\.down_proj",
        ),
        (tiny_llama, indexed(lambda files: files.update(extra=SHARDS[0])), "files: extra"),
        (tiny_llama, in_float8(lambda t: t.pop(f"{UP}_scale_inv")), f"missing.*{UP}_scale_inv"),
        (tiny_llama, without_first_part, "save the model again with it, or use backend torch"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_files_that_do_not_hold_the_model_are_rejected_by_name(
    alone: timedelta,
    tmp_path: Path,
    make: Callable[[], PreTrainedModel],
    fault: Fault,
    message: str,
) -> None:
    folder = save(make(), tmp_path)
    fault(folder)

    with pytest.raises(UnsupportedModelError, match=message):
        megatron_trainer(str(folder), 1, 1)


def test_attention_to_a_window_is_rejected(alone: timedelta, tmp_path: Path) -> None:
    model = tiny_qwen3()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    folder = str(save(model, tmp_path))

    with pytest.raises(UnsupportedModelError, match=r"sliding_attention .*backend torch"):
        megatron_trainer(folder, 1, 1)


def test_mistrals_window_is_rejected_unless_it_sees_everything(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron_trainer(str(save(tiny_mistral(window=128), tmp_path / "all")), 1, 1)

    with pytest.raises(UnsupportedModelError, match=r"window 16.*backend torch"):
        megatron_trainer(str(save(tiny_mistral(window=16), tmp_path / "some")), 1, 1)


def test_a_missing_gpu_is_reported_with_the_setting() -> None:
    with pytest.raises(UnsupportedModelError, match="'cuda' needs a GPU, but this rank has none"):
        device_of("cuda")


def test_rows_lengthened_for_ranks_that_divide_the_sequence_change_nothing(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron, _ = pair(tiny_llama, tmp_path)
    data = random_data(LENGTHS)
    expected = run(megatron, data)
    gradient = gradient_of(megatron)
    megatron.discard_gradient("m")

    lengthen_examples(megatron, 4)
    got = run(megatron, data)

    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-6
    )
    assert_close(gradient_of(megatron), gradient, rtol=1e-5)


def test_ranks_wait_as_long_in_every_group_as_in_that_of_all(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron_trainer(str(save(tiny_llama(), tmp_path)), 1, 1)

    groups = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    ]

    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert [backend.options._timeout for backend in backends] == [alone] * 6
