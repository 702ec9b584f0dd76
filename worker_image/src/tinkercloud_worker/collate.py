"""Examples as micro-batches, packed or padded, and their results in the request's order.

Shape legend: B examples, T positions, N positions of one example, R positions of a micro-batch
that belong to an example, K targets per position.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkercloud_protocol.payloads import FloatArray
from tinkercloud_worker.engine.batch import Batch, Example, ScalarT, micro_batches, packs
from tinkercloud_worker.engine.trainer import LossOutput
from tinkercloud_worker.losses import LossInputs
from tinkercloud_worker.packing import Packed


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Positions:
    """What a loss needs of examples that run together: their positions, one after another."""

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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pack(Positions):
    """Examples whose tokens, too, lie one after another."""

    sequences: Packed


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch(Positions):
    """Examples as rows of one length, and where their positions lie."""

    ids_BT: Tensor
    valid_BT: Tensor


def pack_all(batch: Batch, max_tokens: int, device: torch.device) -> list[Pack]:
    """Divide a batch into packs of at most so many tokens; a longer example is one of its own."""
    return [_pack(group, device) for group in _groups(batch, packs, max_tokens)]


def collate_all(
    batch: Batch, max_tokens: int, device: torch.device | None = None
) -> list[MicroBatch]:
    """Divide a batch into micro-batches of at most so many padded tokens."""
    return [collate(group, device) for group in _groups(batch, micro_batches, max_tokens)]


def _groups(
    batch: Batch, divide: Callable[[Sequence[int], int], list[list[int]]], max_tokens: int
) -> Iterator[list[tuple[int, Example]]]:
    lengths = [len(example.tokens) for example in batch.examples]
    for group in divide(lengths, max_tokens):
        yield [(index, batch.examples[index]) for index in group]


def _pack(examples: Sequence[tuple[int, Example]], device: torch.device) -> Pack:
    ids = np.concatenate([example.tokens for _, example in examples]).astype(np.int64)
    lengths = tuple(len(example.tokens) for _, example in examples)
    return Pack(
        sequences=Packed(torch.from_numpy(ids).to(device), lengths), **_positions(examples, device)
    )


def collate(
    examples: Sequence[tuple[int, Example]], device: torch.device | None = None
) -> MicroBatch:
    """Right-pad examples into one batch, and lay their positions one after another."""
    lengths = torch.tensor([len(example.tokens) for _, example in examples])
    ids_BT = torch.zeros(len(examples), int(lengths.max()), dtype=torch.int64)
    for row, (_, example) in enumerate(examples):
        ids_BT[row, : len(example.tokens)] = torch.from_numpy(example.tokens.astype(np.int64))
    return MicroBatch(
        ids_BT=ids_BT.to(device),
        valid_BT=(torch.arange(ids_BT.shape[1]) < lengths.unsqueeze(1)).to(device),
        **_positions(examples, device),
    )


class _Fields(TypedDict):
    targets_RK: Tensor
    inputs: LossInputs
    examples: Sequence[tuple[int, Example]]


def _positions(examples: Sequence[tuple[int, Example]], device: torch.device | None) -> _Fields:
    width = max(example.targets.shape[1] for _, example in examples)
    lengths = torch.tensor([len(example.tokens) for _, example in examples])
    return {
        "targets_RK": _stack([example.targets for _, example in examples], width).to(device),
        "inputs": LossInputs(
            {
                name: _stack([example.inputs[name] for _, example in examples], width).to(device)
                for name in examples[0][1].inputs
            },
            datum_of_row=torch.repeat_interleave(torch.arange(len(examples)), lengths).to(device),
            num_data=len(examples),
        ),
        "examples": examples,
    }


def _stack(arrays: Sequence[npt.NDArray[ScalarT]], width: int) -> Tensor:
    """Concatenate [N, K] arrays along N; narrower ones get columns of zeros, which weigh 0."""
    padded = [np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in arrays]
    return torch.from_numpy(np.concatenate(padded))


class PassOutput:
    """Collects the results of micro-batches in the request's order."""

    def __init__(self) -> None:
        self._passes: list[tuple[Positions, Tensor, Tensor]] = []

    def add(self, positions: Positions, lp_RK: Tensor, loss_sum: Tensor) -> None:
        """Take the logprobs and the summed loss of a micro-batch, which may not be there yet."""
        self._passes.append((positions, lp_RK, loss_sum))

    def finish(self, batch: Batch) -> LossOutput:
        """Return the whole batch's result."""
        parts = dict(
            part for positions, lp_RK, _ in self._passes for part in positions.split(lp_RK)
        )
        loss = sum(float(loss_sum) for _, _, loss_sum in self._passes)
        metrics = {"loss:sum": loss, "tokens:sum": float(batch.num_tokens)}
        return LossOutput([parts[index] for index in sorted(parts)], metrics)
