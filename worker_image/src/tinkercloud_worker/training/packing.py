"""Packs examples one after another, and returns results in the order of the request.

Shape legend: N positions of one example, R positions of a pack, K targets per position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.batch import Batch, Example, ScalarT, bin_pack, padded_lengths
from tinkercloud_worker.engine.trainer import LossOutput
from tinkercloud_worker.losses import LossInputs


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pack:
    """Examples that run in one pass, one after another, with the loss inputs of their positions."""

    sequences: PackedSequences
    targets_RK: Tensor
    inputs: LossInputs
    examples: Sequence[tuple[int, Example]]
    """The examples, each with its index in the request."""

    def split(self, values_RK: Tensor) -> list[tuple[int, FloatArray]]:
        """Split per-position values into per-example arrays in the client's shape."""
        array = values_RK.cpu().numpy()
        parts, start = [], 0
        for index, example in self.examples:
            stop, width = start + len(example.tokens), example.targets.shape[1]
            part = array[start:stop, :width]
            parts.append((index, part[:, 0] if example.is_flat else part))
            start = stop
        return parts


def pack_all(
    batch: Batch, max_tokens: int, device: torch.device, pad_to_multiple_of: int = 1
) -> Iterator[Pack]:
    """Split a batch into packs of at most `max_tokens`; a longer example gets its own pack.

    A pack is made when it is asked for: all packs of a large batch take as long as many passes.

    Args:
        batch: the examples.
        max_tokens: maximum tokens of a pack.
        device: the device of its tensors.
        pad_to_multiple_of: each example counts as if padded to a multiple of this many tokens.
    """
    lengths = [len(example.tokens) for example in batch.examples]
    for group in bin_pack(padded_lengths(lengths, pad_to_multiple_of), max_tokens):
        yield _pack([(index, batch.examples[index]) for index in group], device)


def split(pack: Pack, max_tokens: int, device: torch.device) -> list[Pack]:
    """Split a pack into packs of at most `max_tokens`; a longer example gets its own pack."""
    lengths = [len(example.tokens) for _, example in pack.examples]
    groups = bin_pack(lengths, max_tokens)
    return [_pack([pack.examples[place] for place in group], device) for group in groups]


def _pack(examples: Sequence[tuple[int, Example]], device: torch.device) -> Pack:
    ids = np.concatenate([example.tokens for _, example in examples]).astype(np.int64)
    lengths = tuple(len(example.tokens) for _, example in examples)
    images = tuple(example.images for _, example in examples)
    images = images if any(images) else ()
    width = max(example.targets.shape[1] for _, example in examples)
    numbers = torch.from_numpy(np.repeat(np.arange(len(examples)), lengths))
    return Pack(
        sequences=PackedSequences(torch.from_numpy(ids).to(device), lengths, images),
        targets_RK=_stack([example.targets for _, example in examples], width).to(device),
        inputs=LossInputs(
            {
                name: _stack([example.inputs[name] for _, example in examples], width).to(device)
                for name in examples[0][1].inputs
            },
            datum_of_row=numbers.to(device),
            num_data=len(examples),
            data=[example.custom for _, example in examples if example.custom is not None],
        ),
        examples=examples,
    )


def _stack(arrays: Sequence[npt.NDArray[ScalarT]], width: int) -> Tensor:
    """Concatenate [N, K] arrays along N, padding narrower ones with zeros, which have weight 0."""
    padded = [
        # `np.pad` copies in any case, and takes longer than all else here.
        array if array.shape[1] == width else np.pad(array, ((0, 0), (0, width - array.shape[1])))
        for array in arrays
    ]
    return torch.from_numpy(np.concatenate(padded))


class PassOutput:
    """Collects the results of micro-batches in the order of the request."""

    def __init__(self) -> None:
        self._passes: list[tuple[Pack, Tensor, Tensor]] = []
        self._expert_tokens_LE: Tensor | None = None

    def add(
        self, pack: Pack, lp_RK: Tensor, loss_sum: Tensor, expert_tokens_LE: Tensor | None = None
    ) -> None:
        """Add the results of a pack; the device may still be computing them.

        Args:
            pack: the pack that ran.
            lp_RK: the logprobs of the targets.
            loss_sum: the summed loss, a scalar.
            expert_tokens_LE: tokens routed to each expert, int64; see `LossOutput`.
        """
        self._passes.append((pack, lp_RK, loss_sum))
        if expert_tokens_LE is not None:
            self.count(expert_tokens_LE)

    def count(self, expert_tokens_LE: Tensor) -> None:
        """Add token counts of experts."""
        so_far_LE = self._expert_tokens_LE
        self._expert_tokens_LE = (
            expert_tokens_LE if so_far_LE is None else so_far_LE + expert_tokens_LE
        )

    def finish(self, batch: Batch) -> LossOutput:
        """Return the result of the full batch."""
        parts = dict(part for pack, lp_RK, _ in self._passes for part in pack.split(lp_RK))
        loss = sum(float(loss_sum) for _, _, loss_sum in self._passes)
        metrics = {"loss:sum": loss, "tokens:sum": float(batch.num_tokens)}
        tokens_LE = self._expert_tokens_LE
        return LossOutput(
            [parts[index] for index in sorted(parts)],
            metrics,
            None if tokens_LE is None else tokens_LE.cpu().numpy(),
        )
