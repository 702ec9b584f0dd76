"""What one GPU must hold, for training and for sampling.

What is assumed of the engines, and which of the figures have been measured, is told in
docs/operate/planning.md. In short: frozen weights are bfloat16; what is trained has a value, a
gradient and two moments in float32: adapters on every rank, but for what experts have each for
itself, which is where the expert is, other models as the base is, and rounded once more in a pass;
activations are those of `activations`; logits exist a few rows at a time, and are gone when the
first layer is computed again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tinkercloud_crds.shapes import ADAPTER_SLOTS
from tinkercloud_planning.activations import (
    SEPARATE,
    Kernels,
    final_per_token,
    kept_per_token,
    layer_values,
    working_per_token,
)
from tinkercloud_planning.architecture import Architecture, Layer, Matrix
from tinkercloud_planning.gpus import Gpu
from tinkercloud_planning.layouts import Layout, largest_share

_WEIGHT_BYTES = 2
_TRAINED_BYTES = 16
"""Value, gradient and two moments of a trained parameter, in float32."""
_STATE_BYTES = 12
"""The same without the gradient."""
_LOGIT_BYTES = 4
_LOGITS_BYTES = 640 << 20
"""What training holds at a time for logits of some rows: in the megatron trainer 256 MiB of them in
float32, half as much that their gradient is rounded to, and 256 MiB of the weight's gradient, if it
is trained. The torch trainer holds as much."""
_FRAGMENTED = 0.3
"""Of activations, what the allocator holds between them and can't give out."""
_PREFILL_TOKENS = 8192
"""Prompt tokens that an engine reads at a time."""
_DECODING_ROWS = 256
"""Sequences whose logits an engine computes at a time."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on one GPU, by what they are for."""

    weights: int
    """Frozen weights."""
    trained: int
    """Adapter, or whole model: values, gradient and moments in training, values in sampling."""
    activations: int
    logits: int
    """In training, what they need beyond the activations, whose peak comes later."""
    fragments: int
    """Between activations, where the allocator has them and can't give them out."""
    kv_cache: int
    neighbour: int
    """What the other one keeps while it waits, where trainer and sampler share the GPU."""
    reserve: int
    """Not given out: contexts, communication buffers, in sampling fragments too."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(size for _, size in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Return names and bytes of the parts."""
        return [(part.name, getattr(self, part.name)) for part in fields(self)]


@dataclass(frozen=True, slots=True)
class _Stage:
    """Costs of a rank of one pipeline stage, in bytes."""

    weights: int
    trained: int
    rounded: int
    """What a pass makes of weights in float32: the same, as weights are kept."""
    per_token: float
    """Activations for each token of a micro-batch, when a layer's backward pass begins."""
    logits: int
    per_token_at_logits: float
    """Activations for each token while there are logits, before any layer's backward pass."""

    def with_tokens(self, tokens: int, *, reserve: int, neighbour: int) -> GpuMemory:
        activations = int(self.per_token * tokens)
        at_logits = int(self.per_token_at_logits * tokens) + self.logits
        logits = max(0, at_logits - activations)
        return GpuMemory(
            weights=self.weights,
            trained=self.trained,
            activations=activations + self.rounded,
            logits=logits,
            fragments=int(_FRAGMENTED * (activations + logits)),
            kv_cache=0,
            neighbour=neighbour,
            reserve=reserve,
        )

    def most_tokens(self, available: int) -> int:
        taken = self.weights + self.trained + self.rounded
        room = (available - taken) / (1 + _FRAGMENTED)
        at_logits = (room - self.logits) / self.per_token_at_logits
        return int(min(room / self.per_token, at_logits))


def training(
    architecture: Architecture,
    layout: Layout,
    *,
    tokens: int,
    lora_rank: int | None,
    kernels: Kernels,
    reserve: int = 0,
    neighbour: int = 0,
) -> GpuMemory:
    """Return what the fullest GPU holds at the peak of a training step.

    Args:
        architecture: the model.
        layout: how it is split.
        tokens: of one micro-batch.
        lora_rank: of the adapter; None for a full fine-tune.
        kernels: that the trainer has.
        reserve: bytes that are not given out.
        neighbour: bytes that an engine keeps on the same GPU.
    """
    stages = (
        stage.with_tokens(tokens, reserve=reserve, neighbour=neighbour)
        for stage in _stages(architecture, layout, lora_rank, kernels)
    )
    return max(stages, key=lambda memory: memory.total)


def weight_bytes(architecture: Architecture) -> int:
    """Return the size of all weights together, as they are kept."""
    return _WEIGHT_BYTES * architecture.parameters


def state_bytes(architecture: Architecture, lora_rank: int | None) -> int:
    """Return the size of what is trained, values and moments, without the gradient.

    Args:
        architecture: the model.
        lora_rank: of the adapter; None for a full fine-tune.
    """
    on_one = training(architecture, Layout(), tokens=0, lora_rank=lora_rank, kernels=SEPARATE)
    return on_one.trained // _TRAINED_BYTES * _STATE_BYTES


def largest_micro_batch(
    architecture: Architecture,
    layout: Layout,
    *,
    available: int,
    lora_rank: int | None,
    kernels: Kernels,
) -> int:
    """Return how many tokens a micro-batch can have; 0 or less if the model alone is too much.

    Args:
        architecture: the model.
        layout: how it is split.
        available: bytes of each GPU that may be used.
        lora_rank: of the adapter; None for a full fine-tune.
        kernels: that the trainer has.
    """
    stages = _stages(architecture, layout, lora_rank, kernels)
    return min(stage.most_tokens(available) for stage in stages)


def sampling(
    architecture: Architecture,
    tensor: int,
    *,
    gpu: Gpu,
    reserve: int,
    lora_rank: int,
    neighbour: int = 0,
) -> GpuMemory:
    """Return what a GPU of an engine holds; keys and values get all that is left, if any is.

    Args:
        architecture: the model.
        tensor: GPUs of the engine.
        gpu: what they are.
        reserve: bytes that are not given out.
        lora_rank: the largest of the adapters that it takes.
        neighbour: bytes that a trainer keeps on the same GPU.
    """
    layout = Layout(tensor=tensor)
    [stage] = _stages(architecture, layout, 0, SEPARATE)
    adapters = adapter_slots(architecture, tensor, lora_rank)
    kinds = (*architecture.leading[:1], architecture.repeated)
    reading = max(layer_values(architecture, kind, layout, 0, SEPARATE) for kind in kinds)
    activations = int(_PREFILL_TOKENS * reading)
    logits = _DECODING_ROWS * architecture.vocab_size * _LOGIT_BYTES
    taken = stage.weights + adapters + activations + logits + neighbour + reserve
    return GpuMemory(
        weights=stage.weights,
        trained=adapters,
        activations=activations,
        logits=logits,
        fragments=0,
        kv_cache=max(0, gpu.memory - taken),
        neighbour=neighbour,
        reserve=reserve,
    )


def adapter_slots(architecture: Architecture, tensor: int, lora_rank: int) -> int:
    """Return the bytes of each GPU that an engine has for adapters, whether it is given any or not.

    As `LoRAMemoryPool` of SGLang 0.5.23 allocates them: each slot is about all matrices, also those
    that no adapter of ours is about, each expert by itself. Layers without experts have slots for
    those as well, and both embeddings have theirs twice, with an A of the input's that is not
    divided.

    Args:
        architecture: the model.
        tensor: GPUs of the engine.
        lora_rank: the largest of the adapters that it takes.
    """
    layout = Layout(tensor=tensor)
    of_experts = sum(_slot_width(m, layout) for m in architecture.repeated.matrices if m.experts)
    width = len(architecture.leading) * of_experts
    for layer, count in architecture.between(0, architecture.layers):
        width += count * sum(_slot_width(matrix, layout) for matrix in layer.matrices)
    vocabulary = architecture.vocab_size + largest_share(architecture.vocab_size, tensor)
    width += 2 * (vocabulary + 2 * architecture.hidden_size)
    return ADAPTER_SLOTS * lora_rank * width * _WEIGHT_BYTES


def _slot_width(matrix: Matrix, layout: Layout) -> int:
    """Return the elements of a matrix's A and B in a slot, for each of the rank."""
    return _copies(matrix, layout) * sum(_cut(matrix, layout))


def kv_bytes_per_token(architecture: Architecture, tensor: int) -> int:
    """Return the bytes that one token's keys and values take on each GPU of an engine."""
    cached = architecture.cached
    heads = largest_share(cached.heads, tensor)
    return architecture.layers * heads * cached.width * _WEIGHT_BYTES


def adapter_parameters(architecture: Architecture, rank: int) -> int:
    """Return the elements of a LoRA adapter of all layers and the output embedding.

    Experts have one rank, and share the halves that lie at hidden states.
    """
    own = (_own_width(matrix, Layout()) for matrix in _adapted(architecture))
    return rank * (_undivided_width(architecture) + sum(own))


def _adapted(architecture: Architecture) -> Iterator[Matrix]:
    yield _head(architecture)
    for layer in [*architecture.leading, *[architecture.repeated] * architecture.repeats]:
        yield from (matrix for matrix in layer.matrices if matrix.adapted)


def _stages(
    architecture: Architecture, layout: Layout, lora_rank: int | None, kernels: Kernels
) -> Iterator[_Stage]:
    per_stage = architecture.layers // layout.pipeline
    undivided = _undivided_width(architecture)
    for number in range(layout.pipeline):
        start = number * per_stage
        runs = architecture.between(start, start + per_stage)
        is_first, is_last = number == 0, number == layout.pipeline - 1
        embeddings = is_first + (is_last and not (is_first and architecture.tied))
        embedding = _held(_head(architecture), layout)
        parameters = embeddings * embedding + (architecture.hidden_size if is_last else 0)
        width = undivided
        for layer, count in runs:
            held = sum(_held(matrix, layout) for matrix in layer.matrices)
            parameters += count * (held + layer.others)
            width += count * sum(_own_width(m, layout) for m in layer.matrices if m.adapted)
        # One forward, one backward: stage 0 has begun as many micro-batches as there are stages
        # before the first of them comes back.
        kept = kept_per_token(architecture, layout, (layout.pipeline - number) * per_stage)
        kinds = [layer for layer, _ in runs]
        working = working_per_token(architecture, layout, kinds, lora_rank or 0, kernels)
        yield _Stage(
            weights=parameters * _WEIGHT_BYTES,
            trained=_TRAINED_BYTES * (parameters if lora_rank is None else lora_rank * width),
            rounded=0 if lora_rank is not None else _rounded(parameters, kinds, layout),
            per_token=kept + working,
            logits=_LOGITS_BYTES if is_last else 0,
            per_token_at_logits=kept + final_per_token(architecture, layout),
        )


def _rounded(parameters: int, layers: list[Layer], layout: Layout) -> int:
    """Return the bytes of weights that a pass rounds; of a layer's experts once more, as one."""
    experts = max(
        sum(_held(matrix, layout) for matrix in layer.matrices if matrix.experts)
        for layer in layers
    )
    return _WEIGHT_BYTES * (parameters + experts)


def _head(architecture: Architecture) -> Matrix:
    return Matrix(architecture.hidden_size, architecture.vocab_size, "column")


def _held(matrix: Matrix, layout: Layout) -> int:
    """Return the elements of a matrix that one rank holds."""
    inputs, outputs = _cut(matrix, layout)
    return _copies(matrix, layout) * inputs * outputs


def _undivided_width(architecture: Architecture) -> int:
    """Return the elements of an adapter that every rank holds, for each of its rank."""
    return sum(_common_width(matrix) for matrix in _adapted(architecture))


def _common_width(matrix: Matrix) -> int:
    """Return the elements of a matrix's A and B that are none of one expert, as above."""
    if not matrix.experts:
        return matrix.inputs + matrix.outputs
    return matrix.outputs if matrix.split == "row" else matrix.inputs


def _own_width(matrix: Matrix, layout: Layout) -> int:
    """Return those that the experts of one rank have for themselves, as above."""
    if not matrix.experts:
        return 0
    inputs, outputs = _cut(matrix, layout)
    return _copies(matrix, layout) * (inputs if matrix.split == "row" else outputs)


def _cut(matrix: Matrix, layout: Layout) -> tuple[int, int]:
    match matrix.split:
        case "column":
            return matrix.inputs, largest_share(matrix.outputs, layout.tensor)
        case "row":
            return largest_share(matrix.inputs, layout.tensor), matrix.outputs
        case "whole":
            return matrix.inputs, matrix.outputs


def _copies(matrix: Matrix, layout: Layout) -> int:
    return largest_share(matrix.experts, layout.expert) if matrix.experts else 1
