"""Which ways of splitting a model exist, whatever memory they need."""

from collections.abc import Iterator
from dataclasses import dataclass

from tinkercloud_planning.architecture import Architecture

_MAX_PIPELINE = 16
_MAX_CONTEXT = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """How training is split: the GPUs are tensor x pipeline x context x data."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Divides context x data: those ranks share the experts out."""
    data: int = 1

    @property
    def ways(self) -> int:
        """GPUs of one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.ways * self.data

    @property
    def multiple(self) -> int:
        """Positions that each sequence is computed as a multiple of, for ranks that divide it."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)


def layouts(architecture: Architecture, gpus: int, per_pod: int) -> Iterator[Layout]:
    """Yield the ways in which training can be split over so many GPUs.

    Tensor parallelism divides heads, key-value heads, the vocabulary and every matrix, inside a
    pod; pipeline parallelism the layers; expert parallelism the experts, over context x data ranks.
    The torch trainer has a copy on each GPU.
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
    """Return the numbers of GPUs that an engine can be split over.

    Unlike training, an engine may copy key-value heads to several GPUs. But it computes with
    weights as they are stored: it cuts no block of them.
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
    """Return the largest part when something is divided as evenly as it can be."""
    return -(-size // ranks)


def pod_size(gpus: int, per_node: int) -> int:
    """Return the GPUs of each pod when so many are to be used by equal pods, few and large."""
    return max(divisor for divisor in divisors(gpus) if divisor <= per_node)


def _expert_parallelisms(architecture: Architecture, ranks: int) -> list[int]:
    return [e for e in divisors(ranks) if e == 1 or _divides_experts(architecture.experts, e)]


def _divides_experts(experts: int, parallelism: int) -> bool:
    return experts > 0 and not experts % parallelism


def _trains_divided(architecture: Architecture, tensor: int) -> bool:
    """Return whether the megatron trainer's ranks can divide a model so.

    Of matrices that are cut nowhere they divide what comes out.
    """
    whole = (m.outputs for m in architecture.repeated.matrices if m.split == "whole")
    divided = (architecture.computed.heads, architecture.vocab_size, *whole)
    return _cuts_evenly(architecture, tensor) and not any(size % tensor for size in divided)


def _cuts_evenly(architecture: Architecture, tensor: int) -> bool:
    """Return whether heads and inner widths can be divided so."""
    widths = _inner_widths(architecture)
    return not architecture.heads % tensor and not any(width % tensor for width in widths)


def _cuts_between_blocks(architecture: Architecture, tensor: int) -> bool:
    """Return whether each part of an inner width is whole blocks of quantized weights.

    SGLang refuses to start otherwise (`Fp8LinearMethod` and `Fp8MoEMethod.create_weights`).
    """
    parts = (width // tensor for width in _inner_widths(architecture))
    return not any(part % architecture.weight_block for part in parts)


def _inner_widths(architecture: Architecture) -> list[int]:
    """Return what tensor parallelism divides; key-value heads are judged by their number."""
    kinds = (*architecture.leading[:1], architecture.repeated)
    matrices = [matrix for layer in kinds for matrix in layer.matrices]
    return [matrix.inputs for matrix in matrices if matrix.split == "row"]
