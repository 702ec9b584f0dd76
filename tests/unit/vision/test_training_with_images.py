"""Training on images against transformers' complete models and autograd."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.families import READS_IMAGES
from tinkercloud_testing.vision import images_of, prompt_of, reference_logits
from tinkercloud_worker.engine.batch import Batch, Example
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.vision.prepared import PreparedImage

ADAM = AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)


def an_example(length: int, images: Sequence[PreparedImage], seed: int = 0) -> Example:
    rng = np.random.default_rng(seed)
    return Example(
        prompt_of(length, images, seed),
        rng.integers(0, 90, (length, 1)),
        {"weights": rng.uniform(0, 1, (length, 1)).astype(np.float32)},
        is_flat=True,
        images=tuple(images),
    )


def examples_of(family: str) -> list[Example]:
    """Return text, a prompt with two images, text, and a prompt that ends in an image."""
    first, second = images_of(family)
    return [
        an_example(7, [], seed=3),
        an_example(20, [first, second], seed=4),
        an_example(9, [], seed=5),
        an_example(second.start + second.count, [second], seed=6),
    ]


def a_trainer(base: TorchBaseModel, max_batch_tokens: int = 64) -> TorchTrainer:
    trainer = TorchTrainer(base, max_batch_tokens=max_batch_tokens)
    trainer.add_model("m", LoraConfig(rank=2))
    return trainer


def a_batch(examples: Sequence[Example], *, forward_only: bool = False) -> Batch:
    return Batch(examples, "cross_entropy", forward_only)


def reference_logprobs(model: PreTrainedModel, example: Example) -> torch.Tensor:
    logits = reference_logits(model, example.tokens, example.images)
    chosen = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(example.targets))
    return chosen[:, 0]


@pytest.mark.parametrize("family", READS_IMAGES)
def test_logprobs_of_packs_with_images_equal_transformers(family: str) -> None:
    model = READS_IMAGES[family]()
    examples = examples_of(family)
    with torch.no_grad():
        expected = [reference_logprobs(model, example).numpy() for example in examples]

    trainer = a_trainer(TorchBaseModel(READS_IMAGES[family]()))
    output = trainer.forward("m", a_batch(examples, forward_only=True), lambda: None)

    for logprobs, theirs in zip(output.logprobs, expected, strict=True):
        np.testing.assert_allclose(logprobs, theirs, atol=1e-5)
    assert output.metrics["tokens:sum"] == sum(len(example.tokens) for example in examples)
