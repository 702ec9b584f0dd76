"""What the curve of a run adds to a step: `python -m benchmarks run_curves`.

Each step is counted, and reported alone, as one JSON line; in a head, steps of the same second
share a report. The step that it is compared with is that of a bare trainer, without HTTP.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement, medians
from benchmarks.suites.training import LORA, a_batch, random_data
from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_worker.engine.run_curves import Curves
from tinkercloud_worker.head.serve.lease_reports import ChangedCurve, curve_lines
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

STEPS = 1000
"""Steps of the curve that are measured together: with fewer than 256 it is never thinned."""


def measure(folder: str) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as scratch:
        tiny = str(save(tiny_llama(), Path(scratch) / "model"))
        for name, path in (("tiny model", tiny), ("SmolLM2", folder)):
            yield _measured(name, path)


def _measured(name: str, folder: str) -> Measurement:
    trainer = TorchTrainer(TorchBaseModel.load(folder, torch.float32), max_batch_tokens=2048)
    trainer.add_model("m", LORA)
    batch = a_batch(trainer, random_data([64] * 4, trainer.limits.vocab_size))
    params, curves = AdamParams(), Curves()
    curve = curves.begin("m", "owner")
    passed = trainer.forward_backward("m", batch).metrics

    def step() -> None:
        trainer.forward_backward("m", batch)
        trainer.optim_step("m", params)

    def counted() -> None:
        for _ in range(STEPS):
            known = curve.curve.stride, curve.curve.num_steps
            curve.count_pass(batch, passed)
            curve.count_step(curve.curve.num_steps + 1, params, 1.0)
            curve_lines(ChangedCurve("m", curve.curve.stride, curve.curve.since(*known)))

    bare, kept = medians(step, counted, rounds=5)
    return Measurement(
        f"R-{name}",
        f"time of the curve / a step of 4 x 64 tokens, {name}",
        kept / STEPS / bare,
        "x",
        "<= 0.01",
        "<= 0.005",
        f"{1e6 * kept / STEPS:.0f} us of {1e3 * bare:.1f} ms",
    )
