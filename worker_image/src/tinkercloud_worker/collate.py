"""Examples as padded micro-batches, and their results in the request's order.

Shape legend: B examples, T positions, N positions of one example, R positions of a micro-batch
that belong to an example, K targets per position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkercloud_protocol.payloads import FloatArray
from tinkercloud_worker.engine.batch import Batch, Example, ScalarT, micro_batches
from tinkercloud_worker.engine.trainer import LossOutput
from tinkercloud_worker.losses import LossInputs


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Examples that run together, and where their positions lie in the padded batch."""

    ids_BT: Tensor
    valid_BT: Tensor
    targets_RK: Tensor
    inputs: LossInputs
    examples: Sequence[tuple[int, Example]]
    """With their index in the request."""

    def split(self, values_RK: Tensor) -> list[tuple[int, FloatArray]]:
        """Cut per-position values into per-example arrays in the client's shape."""
        array = values_RK.cpu().numpy()
        parts, start = [], 0
        for index, example in self.examples:
            stop, width = start + len(example.tokens), example.targets.shape[1]
            part = array[start:stop, :width]
            parts.append((index, part[:, 0] if example.is_flat else part))
            start = stop
        return parts


def collate_all(
    batch: Batch, max_tokens: int, device: torch.device | None = None
) -> list[MicroBatch]:
    """Divide a batch into micro-batches of at most so many padded tokens."""
    lengths = [len(example.tokens) for example in batch.examples]
    return [
        collate([(index, batch.examples[index]) for index in group], device)
        for group in micro_batches(lengths, max_tokens)
    ]


def collate(
    examples: Sequence[tuple[int, Example]], device: torch.device | None = None
) -> MicroBatch:
    """Right-pad examples into one batch, and lay their positions one after another."""
    lengths = torch.tensor([len(example.tokens) for _, example in examples])
    ids_BT = torch.zeros(len(examples), int(lengths.max()), dtype=torch.int64)
    for row, (_, example) in enumerate(examples):
        ids_BT[row, : len(example.tokens)] = torch.from_numpy(example.tokens.astype(np.int64))
    width = max(example.targets.shape[1] for _, example in examples)
    names = examples[0][1].inputs
    return MicroBatch(
        ids_BT=ids_BT.to(device),
        valid_BT=(torch.arange(ids_BT.shape[1]) < lengths.unsqueeze(1)).to(device),
        targets_RK=_stack([example.targets for _, example in examples], width).to(device),
        inputs=LossInputs(
            {
                name: _stack([example.inputs[name] for _, example in examples], width).to(device)
                for name in names
            },
            datum_of_row=torch.repeat_interleave(torch.arange(len(examples)), lengths).to(device),
            num_data=len(examples),
        ),
        examples=examples,
    )


def _stack(arrays: Sequence[npt.NDArray[ScalarT]], width: int) -> Tensor:
    """Concatenate [N, K] arrays along N; narrower ones get columns of zeros, which weigh 0."""
    padded = [np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in arrays]
    return torch.from_numpy(np.concatenate(padded))


class PassOutput:
    """Collects the results of micro-batches in the request's order."""

    def __init__(self, num_examples: int) -> None:
        self._logprobs: list[FloatArray | None] = [None] * num_examples
        self._losses: list[float] = []

    def add(self, micro_batch: MicroBatch, lp_RK: Tensor, loss_sum: float) -> None:
        """Take the logprobs and the summed loss of a micro-batch."""
        for index, part in micro_batch.split(lp_RK):
            self._logprobs[index] = part
        self._losses.append(loss_sum)

    def finish(self, batch: Batch) -> LossOutput:
        """Return the whole batch's result."""
        logprobs = [part for part in self._logprobs if part is not None]
        metrics = {"loss:sum": sum(self._losses), "tokens:sum": float(batch.num_tokens)}
        return LossOutput(logprobs, metrics)
