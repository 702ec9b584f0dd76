"""Training on images against transformers' complete models and autograd."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.families import READS_IMAGES
from tinkercloud_testing.small_models.vision import (
    an_example,
    examples_of,
    gemma_image,
    reference_logits,
)
from tinkercloud_testing.training.peft_twin import PeftTwin
from tinkercloud_testing.training.trainers import assert_close, gradient_of, held_models
from tinkercloud_worker.engine.batch import Batch, Example
from tinkercloud_worker.engine.trainer import TrainingPass
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

ADAM = AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)


def a_trainer(base: TorchBaseModel, max_batch_tokens: int = 64) -> TorchTrainer:
    trainer = TorchTrainer(base, max_batch_tokens=max_batch_tokens)
    trainer.add_model("m", LoraConfig(rank=2, seed=1))
    return trainer


def a_batch(examples: Sequence[Example], *, forward_only: bool = False) -> Batch:
    return Batch(examples, "cross_entropy", forward_only)


def reference_logprobs(model: torch.nn.Module, example: Example) -> torch.Tensor:
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
    output = trainer.forward("m", a_batch(examples, forward_only=True))

    for logprobs, theirs in zip(output.logprobs, expected, strict=True):
        np.testing.assert_allclose(logprobs, theirs, atol=1e-5)
    assert output.metrics["tokens:sum"] == sum(len(example.tokens) for example in examples)


def test_images_of_gemma_3_without_a_token_between_them_see_each_other() -> None:
    """transformers knows runs of placeholders only. Those of Qwen-VL have positions for each."""
    model = READS_IMAGES["Gemma 3"]()
    pair = [gemma_image(2, seed=1), gemma_image(6, seed=2)]
    apart = [gemma_image(2, seed=1), gemma_image(7, seed=2)]
    examples = [an_example(14, pair, seed=1), an_example(14, apart, seed=1)]
    with torch.no_grad():
        expected = [reference_logprobs(model, example).numpy() for example in examples]

    trainer = a_trainer(TorchBaseModel(READS_IMAGES["Gemma 3"]()))
    output = trainer.forward("m", a_batch(examples, forward_only=True))

    for logprobs, theirs in zip(output.logprobs, expected, strict=True):
        np.testing.assert_allclose(logprobs, theirs, atol=1e-5)


def twin_logprobs(twin: PeftTwin, example: Example) -> torch.Tensor:
    return reference_logprobs(twin.model, example)


@pytest.mark.parametrize("family", READS_IMAGES)
def test_steps_equal_those_of_peft_and_autograd(family: str) -> None:
    """Two packs, of which one is recomputed layer by layer in the backward pass."""
    examples = examples_of(family)
    base = TorchBaseModel(READS_IMAGES[family]())
    trainer = TorchTrainer(base, max_batch_tokens=32, max_kept_tokens=25)
    trainer.add_model("m", LoraConfig(rank=2))
    twin = PeftTwin(READS_IMAGES[family](), trainer.copy_weights("m"))

    for _ in range(2):
        output = trainer.forward_backward("m", a_batch(examples))
        loss = torch.zeros(())
        for example, ours in zip(examples, output.logprobs, strict=True):
            logprobs = twin_logprobs(twin, example)
            np.testing.assert_allclose(ours, logprobs.detach().numpy(), atol=1e-5)
            weights = torch.from_numpy(example.inputs["weights"][:, 0])
            loss = loss - (logprobs * weights).sum()
        loss.backward()
        assert_close(gradient_of(trainer), twin.gradients(), rtol=1e-4)
        assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
        trainer.optim_step("m", ADAM)
        twin.optim_step(ADAM)


@pytest.mark.parametrize("family", ["Qwen3-VL", "Gemma 3"])
def test_a_diverged_model_changes_no_other_in_a_shared_pass_with_images(family: str) -> None:
    base = TorchBaseModel(READS_IMAGES[family]())
    trainer = a_trainer(base)
    trainer.add_model("broken", LoraConfig(rank=2))
    held_models(trainer)["broken"].trainable.flat.detach()[:] = float("nan")
    trainer.add_model("text", LoraConfig(rank=2, seed=2))
    text, pictures, *_ = examples_of(family)
    passes = [
        TrainingPass("broken", a_batch([pictures])),
        TrainingPass("text", a_batch([text])),
        TrainingPass("m", a_batch([pictures])),
    ]
    assert trainer.can_batch(passes[:2], passes[2])

    broken, *together = trainer.run_batch(passes, lambda: None)

    alone = a_trainer(base)
    alone.add_model("text", LoraConfig(rank=2, seed=2))
    assert np.isnan(broken.logprobs[0]).all()
    for each, output in zip(passes[1:], together, strict=True):
        expected = alone.forward_backward(each.model_id, each.batch)
        np.testing.assert_allclose(output.logprobs[0], expected.logprobs[0], atol=1e-5)
        assert_close(
            gradient_of(trainer, each.model_id), gradient_of(alone, each.model_id), rtol=1e-4
        )


def test_a_model_whose_files_lack_the_tower_reads_text_only(tmp_path: Path) -> None:
    model = READS_IMAGES["Qwen2.5-VL"]()
    whole = model.state_dict()
    text = {name: weight for name, weight in whole.items() if ".visual." not in name}
    model.save_pretrained(tmp_path, state_dict=text)
    visual = sum(whole[name].nbytes for name in whole.keys() - text.keys())

    complete = TorchBaseModel(model)
    base = TorchBaseModel.load(str(tmp_path), torch.float32)

    assert complete.images.are_read
    assert complete.images.num_bytes == visual
    assert complete.named_weights().keys() == base.named_weights().keys()
    assert not base.images.are_read
    with pytest.raises(ValueError, match="reads text only"):
        a_trainer(base).forward("m", a_batch(examples_of("Qwen2.5-VL")[1:2]))
