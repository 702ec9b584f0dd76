"""Imported adapters compute what PEFT computes, and are exported with the same values."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft as peft_library
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.adapters import peft
from tinkercloud_protocol.heads.checkpoint_manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CheckpointManifest,
    ImportedAdapter,
)
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.data import a_datum
from tinkercloud_testing.small_models.models import save, tiny_llama, tiny_mixtral, tiny_qwen3_moe
from tinkercloud_testing.training.peft_adapters import WEIGHTS, logprobs, logprobs_of, write_adapter
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.trainer import TrainingState, WeightsCopy
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.imported_weights import complete
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

Make = Callable[[], PreTrainedModel]
TIED: Make = partial(tiny_llama, tied=True)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOKENS = [5, 6, 7, 8, 9, 3, 2]
ADAPTERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "all linear layers": (tiny_llama, {"target_modules": "all-linear", "lora_alpha": 11}),
    "two modules": (tiny_llama, {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 64}),
    "a pattern": (tiny_llama, {"target_modules": r".*\.1\.mlp\.(up|down)_proj"}),
    "one layer": (tiny_llama, {"target_modules": ["up_proj"], "layers_to_transform": [0]}),
    "rank-stabilized": (tiny_llama, {"target_modules": ATTENTION, "use_rslora": True}),
    "the LM head": (tiny_llama, {"target_modules": ["q_proj", "lm_head"]}),
    "in bfloat16": (tiny_llama, {"target_modules": ATTENTION, "dtype": torch.bfloat16}),
    "in float16": (tiny_llama, {"target_modules": ATTENTION, "dtype": torch.float16}),
    "tied": (TIED, {"target_modules": "all-linear", "r": 3}),
    "a tied LM head": (TIED, {"target_modules": [*ATTENTION, "lm_head"]}),
    "attention of a mixture": (tiny_qwen3_moe, {"target_modules": ATTENTION}),
}


def read(folder: Path, base: Path) -> tuple[LoraConfig, WeightsCopy]:
    """Read an adapter folder as the API server and a head do."""
    content = (folder / WEIGHTS).read_bytes()
    config = peft.read_config(json.loads((folder / "adapter_config.json").read_text()))
    start = content[: peft.header_bytes(content)]
    manifest = CheckpointManifest(
        tinker_path="tinker://s:train:0/weights/a",
        owner="me",
        base_model="tiny",
        lora=peft.read_header(start, len(content), config.rank),
        step=0,
        created_at=datetime.now(UTC),
        imported=ImportedAdapter(scale=config.scale),
        files={},
    )
    weights = formats.decode_weights(manifest, {ADAPTER_WEIGHTS: content})
    assert manifest.lora is not None
    return manifest.lora, complete(manifest, weights, str(base))


def imported(make: Make, folder: Path, base: Path) -> TorchTrainer:
    """Return a trainer whose model "m" is the adapter in a folder."""
    config, weights = read(folder, base)
    trainer = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=32)
    trainer.add_model("m", config)
    trainer.import_state("m", TrainingState(weights, None, 0))
    return trainer


def scores(trainer: TorchTrainer) -> np.ndarray[Any, Any]:
    output = run(trainer, [a_datum(TOKENS)])
    trainer.discard_gradient("m")
    return output.logprobs[0][:-1]


def exported(trainer: TorchTrainer, folder: Path) -> Path:
    """Write the files of a trainer's sampler checkpoint."""
    folder.mkdir()
    for name, content in formats.encode_weights(trainer.copy_weights("m"), "base").items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], Path]:
    """Return the folder of a base model."""
    saved: dict[Make, Path] = {}

    def folder_of(make: Make) -> Path:
        if make not in saved:
            saved[make] = save(make(), tmp_path_factory.mktemp("base"))
        return saved[make]

    return folder_of


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_imported_adapter_has_pefts_logprobs_and_so_has_its_export(
    name: str, tmp_path: Path, base: Callable[[Make], Path]
) -> None:
    make, config = ADAPTERS[name]
    folder = write_adapter(make(), tmp_path / "adapter", **config)
    expected = logprobs(make(), folder, TOKENS)

    trainer = imported(make, folder, base(make))

    np.testing.assert_allclose(scores(trainer), expected, atol=1e-5)
    again = logprobs(make(), exported(trainer, tmp_path / "exported"), TOKENS)
    np.testing.assert_allclose(again, expected, atol=1e-5)


def test_training_an_imported_adapter_also_trains_the_weights_that_it_lacked(
    tmp_path: Path, base: Callable[[Make], Path]
) -> None:
    folder = write_adapter(tiny_llama(), tmp_path / "adapter", target_modules=["q_proj"])
    trainer = imported(tiny_llama, folder, base(tiny_llama))
    before = trainer.copy_weights("m").tensors

    for _ in range(2):
        run(trainer, [a_datum(TOKENS)])
        trainer.optim_step("m", AdamParams(learning_rate=1e-2))

    after = trainer.copy_weights("m").tensors
    name = "model.layers.0.self_attn.k_proj.lora_B.weight"
    assert not before[name].any()
    assert after[name].any()


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers):UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("make", [tiny_llama, TIED])
def test_the_copy_of_the_lm_head_that_peft_saves_must_equal_the_base_models(
    make: Make, tmp_path: Path, base: Callable[[Make], Path]
) -> None:
    config = peft_library.LoraConfig(target_modules=["lm_head"], r=4, task_type="CAUSAL_LM")
    adapted = peft_library.get_peft_model(make(), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(str(tmp_path))
    (copy,) = [name for name in load_file(tmp_path / WEIGHTS) if "lora_" not in name]
    expected = logprobs_of(adapted.eval(), TOKENS)

    trainer = imported(make, tmp_path, base(make))

    np.testing.assert_allclose(scores(trainer), expected, atol=1e-5)
    wrong(lambda tensors: {**tensors, copy: tensors[copy] * 1.01}, tmp_path)
    with pytest.raises(InvalidRequest, match=r"lm_head\.base_layer\.weight.* differs"):
        read(tmp_path, base(make))


def renamed(folder: Path, rename: Callable[[str], str]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    save_file({rename(name): each for name, each in tensors.items()}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
    ],
)
def test_names_without_pefts_prefix_or_with_an_adapters_name_are_read(
    tmp_path: Path, base: Callable[[Make], Path], rename: Callable[[str], str]
) -> None:
    folder = write_adapter(tiny_llama(), tmp_path / "adapter", target_modules=ATTENTION)
    expected = logprobs(tiny_llama(), folder, TOKENS)

    trainer = imported(tiny_llama, renamed(folder, rename), base(tiny_llama))

    np.testing.assert_allclose(scores(trainer), expected, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_qwen3_moe, tiny_mixtral])
@pytest.mark.parametrize("encode", [formats.encode_weights, formats.encode_for_servers])
def test_experts_are_imported_as_they_are_exported(
    make: Make,
    encode: Callable[[WeightsCopy, str], formats.Files],
    tmp_path: Path,
    base: Callable[[Make], Path],
) -> None:
    trainer = TorchTrainer(TorchBaseModel(make()), max_batch_tokens=32)
    trainer.add_model("m", LoraConfig(rank=4, seed=1))
    for _ in range(2):
        run(trainer, [a_datum(TOKENS)])
        trainer.optim_step("m", AdamParams(learning_rate=3e-2))
    folder = tmp_path / "exported"
    folder.mkdir()
    for name, content in encode(trainer.copy_weights("m"), "base").items():
        (folder / name).write_bytes(content)
    assert (folder / ADAPTER_CONFIG).is_file()

    copy = imported(make, folder, base(make))

    np.testing.assert_allclose(scores(copy), scores(trainer), atol=1e-6)


def wrong(change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], folder: Path) -> Path:
    tensors = change(load_file(folder / WEIGHTS))
    save_file(dict(tensors), folder / WEIGHTS)
    return folder


def without_an_expert(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: each for name, each in tensors.items() if ".experts.1." not in name}


def with_experts_that_differ(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    name = next(each for each in tensors if ".experts.1.gate_proj.lora_A" in each)
    return {**tensors, name: tensors[name] + 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_an_expert, "it must have all experts from 0 on"),
        (with_experts_that_differ, "differs between experts"),
    ],
)
def test_experts_that_no_adapter_of_ours_has_are_rejected(
    change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    message: str,
    tmp_path: Path,
    base: Callable[[Make], Path],
) -> None:
    trainer = TorchTrainer(TorchBaseModel(tiny_qwen3_moe()), max_batch_tokens=32)
    trainer.add_model("m", LoraConfig(rank=4, seed=1))
    folder = tmp_path / "exported"
    folder.mkdir()
    for name, content in formats.encode_for_servers(trainer.copy_weights("m"), "base").items():
        (folder / name).write_bytes(content)

    with pytest.raises(InvalidRequest, match=message):
        read(wrong(change, folder), base(tiny_qwen3_moe))


def test_an_adapter_of_another_model_is_rejected_by_name(
    tmp_path: Path, base: Callable[[Make], Path]
) -> None:
    larger = write_adapter(
        tiny_llama(hidden_size=64), tmp_path / "larger", target_modules=["q_proj"]
    )
    deeper = write_adapter(tiny_llama(layers=3), tmp_path / "deeper", target_modules=["q_proj"])

    with pytest.raises(InvalidRequest, match=r"q_proj.*has shape \[4, 64\], but this model needs"):
        read(larger, base(tiny_llama))
    with pytest.raises(InvalidRequest, match=r"can't be adapted in this model: .*layers\.2"):
        read(deeper, base(tiny_llama))


def test_a_new_a_does_not_depend_on_what_else_the_adapter_has(
    tmp_path: Path, base: Callable[[Make], Path]
) -> None:
    few = write_adapter(tiny_llama(), tmp_path / "few", target_modules=["q_proj"])
    more = write_adapter(tiny_llama(), tmp_path / "more", target_modules=["q_proj", "v_proj"])
    name = "model.layers.1.self_attn.k_proj.lora_A.weight"

    first, second = (read(folder, base(tiny_llama))[1].tensors for folder in (few, more))

    torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
    assert adapters.scale(4) == 8
