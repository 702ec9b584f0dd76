"""The possible ways to divide a model over GPUs, regardless of memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from tinkercloud_planning.architecture import Architecture

_MAX_PIPELINE = 16
_MAX_CONTEXT = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """How training is divided: the number of GPUs is tensor x pipeline x context x data."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Divides context x data: those ranks share the experts."""
    data: int = 1

    @property
    def ways(self) -> int:
        """Number of GPUs per copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return self.ways * self.data

    @property
    def multiple(self) -> int:
        """Sequence lengths are padded to a multiple of this, so that ranks can divide them."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)


def layouts(architecture: Architecture, gpus: int, per_pod: int) -> Iterator[Layout]:
    """Yield the ways to divide training over so many GPUs.

    Tensor parallelism divides heads, key-value heads, the vocabulary and every matrix, within a
    pod; pipeline parallelism divides the layers; expert parallelism the experts, over context x
    data ranks. The torch trainer has a copy on each GPU.
    """
    if architecture.only_torch:
        yield Layout(data=gpus)
        return
    for tensor in divisors(per_pod):
        if not _trains_divided(architecture, tensor):
            continue
        for pipeline in divisors(gpus // tensor):
            if pipeline > _MAX_PIPELINE or architecture.layers % pipeline:
                continue
            rest = gpus // (tensor * pipeline)
            for context in divisors(rest):
                if context > _MAX_CONTEXT:
                    break
                for expert in _expert_parallelisms(architecture, rest):
                    yield Layout(tensor, pipeline, context, expert, rest // context)


def engine_sizes(architecture: Architecture, per_pod: int) -> list[int]:
    """Return the numbers of GPUs that an engine can be divided over.

    Unlike training, an engine may replicate key-value heads on several GPUs. But it computes with
    weights as they are stored, so it cannot divide a block of quantized weights.
    """
    heads = architecture.cached.heads
    return [
        tensor
        for tensor in divisors(per_pod)
        if (not heads % tensor or not tensor % heads)
        and _cuts_evenly(architecture, tensor)
        and (tensor == 1 or _cuts_between_blocks(architecture, tensor))
    ]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    return [divisor for divisor in range(1, number + 1) if not number % divisor]


def largest_share(size: int, ranks: int) -> int:
    """Return the largest part if something is divided as evenly as possible."""
    return -(-size // ranks)


def pod_size(gpus: int, per_node: int) -> int:
    """Return the number of GPUs per pod if so many GPUs are used by few equal pods."""
    return max(divisor for divisor in divisors(gpus) if divisor <= per_node)


def _expert_parallelisms(architecture: Architecture, ranks: int) -> list[int]:
    return [e for e in divisors(ranks) if e == 1 or _divides_experts(architecture.experts, e)]


def _divides_experts(experts: int, parallelism: int) -> bool:
    return experts > 0 and not experts % parallelism


def _trains_divided(architecture: Architecture, tensor: int) -> bool:
    """Return whether ranks of the megatron trainer can divide a model this way.

    They divide the outputs of matrices that are not split.
    """
    whole = (m.outputs for m in architecture.repeated.matrices if m.split == "whole")
    divided = (architecture.computed.heads, architecture.vocab_size, *whole)
    return _cuts_evenly(architecture, tensor) and not any(size % tensor for size in divided)


def _cuts_evenly(architecture: Architecture, tensor: int) -> bool:
    """Return whether heads and inner widths are divisible."""
    widths = _inner_widths(architecture)
    return not architecture.heads % tensor and not any(width % tensor for width in widths)


def _cuts_between_blocks(architecture: Architecture, tensor: int) -> bool:
    """Return whether each part of an inner width consists of whole blocks of quantized weights.

    SGLang fails to start otherwise (`Fp8LinearMethod` and `Fp8MoEMethod.create_weights`).
    """
    parts = (width // tensor for width in _inner_widths(architecture))
    return not any(part % architecture.weight_block for part in parts)


def _inner_widths(architecture: Architecture) -> list[int]:
    """Return the widths that tensor parallelism divides, apart from key-value heads."""
    kinds = (*architecture.leading[:1], architecture.repeated)
    matrices = [matrix for layer in kinds for matrix in layer.matrices]
    return [matrix.inputs for matrix in matrices if matrix.split == "row"]
