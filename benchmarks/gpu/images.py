"""Prompts with images, through tiny random models of each family that reads them."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.engines import MODEL
from benchmarks.shared.measuring import Measurement, largest_error
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_worker.engine.batch import Batch, Example
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.vision.prepared import PreparedImage

_DEVICES = ("cuda", "cpu")
_LENGTHS = (20, 9)


def logprobs(bench: Bench) -> Iterator[Measurement]:
    """N8: logprobs of prompts with two images against transformers on the CPU, in float32.

    Raises:
        Skipped: what the tiny models need is not installed, or the device is another.
    """
    if bench.device.type not in _DEVICES:
        raise Skipped(f"images are computed on {' or '.join(_DEVICES)}, not on {bench.device.type}")
    try:
        from tinkercloud_testing.small_models.families import READS_IMAGES  # noqa: PLC0415
        from tinkercloud_testing.small_models.vision import images_of, reference_logits  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise Skipped(f"{missing.name} is not installed") from None
    errors: dict[str, float] = {}
    for family, make in READS_IMAGES.items():
        model = make()
        images = images_of(family)
        examples = [_example(_LENGTHS[0], images), _example(_LENGTHS[1], [])]
        expected = []
        for example in examples:
            with torch.no_grad():
                logits = reference_logits(model, example.tokens, example.images)
            chosen = torch.from_numpy(example.targets)
            expected.append(torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy())
        torch.nn.Module.to(model, bench.device)
        trainer = TorchTrainer(TorchBaseModel(model), max_batch_tokens=64)
        trainer.add_model(MODEL, LoraConfig(rank=2, seed=1))
        batch = Batch(examples, "cross_entropy", forward_only=False)
        output = trainer.forward_backward(MODEL, batch)
        metrics = trainer.optim_step(MODEL, AdamParams(learning_rate=1e-3))
        pairs = zip(output.logprobs, expected, strict=True)
        of_family = [float(np.abs(ours.flatten() - theirs).max()) for ours, theirs in pairs]
        # A gradient that is not finite has no norm, and makes the step fail.
        errors[family] = largest_error([*of_family, 0.0 * metrics["grad_norm"]])
    note = "; ".join(f"{family}: {error:.1e}" for family, error in errors.items())
    what = "prompts with images: logprobs off transformers'"
    yield Measurement("N8", what, largest_error(errors.values()), "", "<= 1e-4", "<= 1e-5", note)


def _example(length: int, images: Sequence[PreparedImage]) -> Example:
    from tinkercloud_testing.small_models.vision import prompt_of  # noqa: PLC0415 - see `logprobs`

    rng = np.random.default_rng(length)
    targets, weights = rng.integers(0, 90, (length, 1)), np.ones((length, 1), np.float32)
    tokens = prompt_of(length, images, seed=length)
    return Example(tokens, targets, {"weights": weights}, is_flat=True, images=tuple(images))
