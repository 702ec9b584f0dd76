"""Images at the ranks of a torch trainer, against one rank."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    SamplerConfig,
    TrainerConfig,
)
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.requests.image_files import IMAGE_MODEL_TYPES
from tinkercloud_testing.ranks.ranks import (
    BATCH_TOKENS,
    MeasuredTrainer,
    ReplicaWithImages,
    TrainerOf,
)
from tinkercloud_testing.small_models.families import READS_IMAGES
from tinkercloud_testing.small_models.vision import examples_of
from tinkercloud_testing.small_models.vision_models import save_vision_model, tiny_qwen_vl
from tinkercloud_testing.training.trainers import assert_close, gradient_of
from tinkercloud_worker.build_images import build_images
from tinkercloud_worker.build_trainer import torch_rank
from tinkercloud_worker.engine.batch import Batch, Example
from tinkercloud_worker.engine.trainer import DirectTrainer, LossOutput, TrainingPass
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import check
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.adam import AdamTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=2, seed=1)
ADAM = AdamParams(learning_rate=1e-3, eps=1e-8)

KINDS: dict[str, Callable[[str], Callable[[], AdamTrainer]]] = {
    "replicas": lambda family: partial(ReplicaWithImages, family),
    "sharded": lambda family: partial(MeasuredTrainer, None, READS_IMAGES[family]),
    "sharded, computed again": lambda family: partial(MeasuredTrainer, 0, READS_IMAGES[family]),
}


def one_rank(family: str) -> TorchTrainer:
    return TorchTrainer(TorchBaseModel(READS_IMAGES[family]()), max_batch_tokens=BATCH_TOKENS)


def run(trainer: DirectTrainer, examples: Sequence[Example]) -> LossOutput:
    batch = Batch(examples, "cross_entropy", forward_only=False)
    return trainer.forward_backward("m", batch)


def assert_same_steps(
    ranked: DirectTrainer, single: DirectTrainer, batches: Sequence[Sequence[Example]]
) -> None:
    for examples in batches:
        got, expected = (run(trainer, examples) for trainer in (ranked, single))
        assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
        for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert_close(gradient_of(ranked), gradient_of(single), rtol=1e-4)
        norms = [trainer.optim_step("m", ADAM)["grad_norm"] for trainer in (ranked, single)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", READS_IMAGES)
def test_adapters_are_trained_on_images_as_on_one_rank(
    trainer_of: TrainerOf, family: str, kind: str
) -> None:
    """In the second batch, only one rank gets images; in the third, one gets no example."""
    ranked, single = trainer_of(2, KINDS[kind](family)), one_rank(family)
    for trainer in (ranked, single):
        trainer.add_model("m", LORA)
    text, pictures, _, picture = examples_of(family)

    assert ranked.reads_images
    batches = [examples_of(family), [text, picture], [pictures], [text, pictures]]
    assert_same_steps(ranked, single, batches)


@pytest.mark.parametrize("kind", ["sharded", "sharded, computed again"])
@pytest.mark.parametrize("family", READS_IMAGES)
def test_sharded_whole_models_are_trained_on_images_as_on_one_rank(
    trainer_of: TrainerOf, family: str, kind: str
) -> None:
    ranked, single = trainer_of(2, KINDS[kind](family)), one_rank(family)
    for trainer in (ranked, single):
        trainer.add_model("m", None)

    assert_same_steps(ranked, single, [examples_of(family)] * 2)


@pytest.mark.parametrize("family", READS_IMAGES)
def test_adapters_share_passes_with_images_at_replicas(trainer_of: TrainerOf, family: str) -> None:
    ranked = trainer_of(2, KINDS["replicas"](family))
    text, pictures, _, picture = examples_of(family)
    batches = {"a": [text, picture], "b": [pictures]}
    for name in (*batches, "m"):
        ranked.add_model(name, LORA)
    passes = [
        TrainingPass(name, Batch(examples, "cross_entropy", forward_only=False))
        for name, examples in batches.items()
    ]

    assert ranked.batcher.can_batch(passes[:1], passes[1])
    together = ranked.batcher.run_batch(passes, lambda: None)

    for output, (name, examples) in zip(together, batches.items(), strict=True):
        alone = run(ranked, examples)
        assert_close(gradient_of(ranked, name), gradient_of(ranked), rtol=1e-4)
        ranked.discard_gradient("m")
        assert output.metrics == pytest.approx(alone.metrics, rel=1e-5)
        for ours, theirs in zip(output.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def a_head(folder: Path, *, sharded: bool) -> HeadConfig:
    """Return the settings of a head that loads no base model: an engine samples."""
    return HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=str(folder)),
        token_file="",
        checkpoint_root=folder.as_uri(),
        scratch_dir=str(folder),
        trainer=TrainerConfig(ranks=2, sharded=sharded, max_batch_tokens=BATCH_TOKENS),
        sampler=SamplerConfig(
            backend="sglang", inference=InferenceConfig(urls=["http://127.0.0.1:1"])
        ),
    )


def refuse_to_load() -> TorchBaseModel:
    raise AssertionError("the head needs no copy")


@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "sharded"])
def test_ranks_tell_their_head_whether_their_files_have_a_tower(
    trainer_of: TrainerOf, tmp_path: Path, sharded: bool
) -> None:
    config = a_head(save_vision_model(tmp_path), sharded=sharded)
    complete = trainer_of(2, partial(torch_rank, config))
    assert build_images(config, refuse_to_load, complete).processor is not None

    whole = tiny_qwen_vl().state_dict()
    text = {name: weight for name, weight in whole.items() if ".visual." not in name}
    tiny_qwen_vl().save_pretrained(tmp_path, state_dict=text)
    lacking = trainer_of(2, partial(torch_rank, config))

    images = build_images(config, refuse_to_load, lacking)
    assert images.processor is None
    assert "lack its vision tower" in images.refusal


@pytest.mark.parametrize("model_type", sorted(IMAGE_MODEL_TYPES))
def test_megatron_ranks_reject_vision_language_models_by_name(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)

    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' .* use backend torch"):
        check(config, Parallelism())
