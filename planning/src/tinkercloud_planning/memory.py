"""Estimates of the memory of one GPU, for training and for sampling.

docs/operate/planning.md lists the assumptions about the engines and the measured figures. In
short: frozen weights are bfloat16, or in engines float8 if they are stored so. Trained parameters
have a value, a gradient and two moments in float32. Adapters are replicated on every rank, except
for the parts that belong to single experts, which are on the expert's rank; fully fine-tuned models
are divided like the base model, and rounded to bfloat16 during a pass. Activations are estimated by
`activations`. Logits are computed for a few rows at a time, and are freed before the first layer is
recomputed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tinkercloud_crds.pods.shapes import ADAPTER_SLOTS
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
_SCALE_BYTES = 4
"""Bytes of the scale of a block of float8 weights."""
_TRAINED_BYTES = 16
"""Bytes of value, gradient and two moments of a trained parameter, in float32."""
_STATE_BYTES = 12
"""Bytes of the same without the gradient."""
_LOGIT_BYTES = 4
_LOGITS_BYTES = 640 << 20
"""Memory of the logits during training: in the megatron trainer 256 MiB of logits in float32, half
as much for their gradient, and 256 MiB for the weight's gradient if it is trained. The torch
trainer needs the same."""
_FRAGMENTED = 0.3
"""Memory lost to fragmentation, relative to that of activations."""
_PREFILL_TOKENS = 8192
"""Number of prompt tokens that an engine processes at a time."""
_KEPT_FEATURES = 256 << 20
"""Bytes of features of images that the head's own torch trainer and sampler keep for later passes
(`tinkercloud_worker.vision.tower`). SGLang keeps 100 MB (`SGLANG_VLM_CACHE_SIZE_MB`)."""
_DECODING_ROWS = 256
"""Number of sequences whose logits an engine computes at a time."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in bytes, by purpose."""

    weights: int
    """Frozen weights."""
    trained: int
    """Adapter or fully fine-tuned model: values, gradient and moments in training, values in
    sampling."""
    activations: int
    images: int
    """Upper estimate of what computing the largest image takes, and its features; 0 for models of
    text only."""
    logits: int
    """In training, the memory they need beyond the activations, whose peak comes later."""
    fragments: int
    """Memory between activations that the allocator cannot use."""
    kv_cache: int
    neighbour: int
    """Memory that the other one keeps while it waits, if trainer and sampler share the GPU."""
    reserve: int
    """Unavailable memory: contexts, communication buffers, and in sampling also fragments."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(size for _, size in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Return name and size of each part."""
        return [(part.name, getattr(self, part.name)) for part in fields(self)]


@dataclass(frozen=True, slots=True)
class _Stage:
    """Memory of a rank of one pipeline stage, in bytes."""

    weights: int
    images: int
    trained: int
    rounded: int
    """Copies of float32 weights in the format of the base weights during a pass."""
    per_token: float
    """Activations per token of a micro-batch at the start of a layer's backward pass."""
    logits: int
    per_token_at_logits: float
    """Activations per token while logits exist, before any layer's backward pass."""

    def with_tokens(self, tokens: int, *, reserve: int, neighbour: int) -> GpuMemory:
        activations = int(self.per_token * tokens)
        at_logits = int(self.per_token_at_logits * tokens) + self.logits
        logits = max(0, at_logits - activations)
        return GpuMemory(
            weights=self.weights,
            trained=self.trained,
            activations=activations + self.rounded,
            images=self.images,
            logits=logits,
            fragments=int(_FRAGMENTED * (activations + logits)),
            kv_cache=0,
            neighbour=neighbour,
            reserve=reserve,
        )

    def most_tokens(self, available: int) -> int:
        taken = self.weights + self.images + self.trained + self.rounded
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
    models: int = 1,
    reserve: int = 0,
    neighbour: int = 0,
) -> GpuMemory:
    """Return the peak memory of a training step on the fullest GPU.

    Args:
        architecture: The model.
        layout: How the model is divided.
        tokens: Tokens of one micro-batch.
        lora_rank: Rank of the adapter; None for full fine-tuning.
        kernels: Kernels of the trainer.
        models: Number of models that are trained in turns.
        reserve: Unavailable bytes.
        neighbour: Bytes that an engine keeps on the same GPU.
    """
    stages = (
        stage.with_tokens(tokens, reserve=reserve, neighbour=neighbour)
        for stage in _stages(architecture, layout, lora_rank, kernels, models)
    )
    return max(stages, key=lambda memory: memory.total)


def weight_bytes(architecture: Architecture) -> int:
    """Return the total size of the stored weights."""
    return _WEIGHT_BYTES * architecture.parameters - _saved_by_float8(architecture, Layout())


def state_bytes(architecture: Architecture, lora_rank: int | None) -> int:
    """Return the size of the trained state: values and moments, without the gradient.

    Args:
        architecture: The model.
        lora_rank: Rank of the adapter; None for full fine-tuning.
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
    models: int = 1,
) -> int:
    """Return the maximum tokens of a micro-batch; 0 or less if the model alone does not fit.

    Args:
        architecture: The model.
        layout: How the model is divided.
        available: Available bytes per GPU.
        lora_rank: Rank of the adapter; None for full fine-tuning.
        kernels: Kernels of the trainer.
        models: Number of models that are trained in turns.
    """
    stages = _stages(architecture, layout, lora_rank, kernels, models)
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
    """Return the memory of a GPU of an engine; the rest of it is used for keys and values.

    Args:
        architecture: The model.
        tensor: Number of GPUs of the engine.
        gpu: Type of the GPUs.
        reserve: Unavailable bytes.
        lora_rank: Maximum rank of the adapters that it accepts.
        neighbour: Bytes that a trainer keeps on the same GPU.
    """
    layout = Layout(tensor=tensor)
    [stage] = _stages(architecture, layout, 0, SEPARATE)
    weights = stage.weights - _saved_by_float8(architecture, layout)
    adapters = adapter_slots(architecture, tensor, lora_rank)
    kinds = (*architecture.leading[:1], architecture.repeated)
    reading = max(layer_values(architecture, kind, layout, 0, SEPARATE) for kind in kinds)
    activations = int(_PREFILL_TOKENS * reading)
    logits = _DECODING_ROWS * architecture.vocab_size * _LOGIT_BYTES
    images = stage.images
    taken = weights + adapters + activations + images + logits + neighbour + reserve
    return GpuMemory(
        weights=weights,
        trained=adapters,
        activations=activations,
        images=images,
        logits=logits,
        fragments=0,
        kv_cache=max(0, gpu.memory - taken),
        neighbour=neighbour,
        reserve=reserve,
    )


def adapter_slots(architecture: Architecture, tensor: int, lora_rank: int) -> int:
    """Return the bytes per GPU that an engine allocates for adapters, used or not.

    Follows `LoRAMemoryPool` of SGLang 0.5.23: each slot has room for all matrices, including those
    that our adapters never target, and for each expert separately. Layers without experts have
    slots for experts too, and both embeddings have theirs twice, with an undivided A of the input.

    Args:
        architecture: The model.
        tensor: Number of GPUs of the engine.
        lora_rank: Maximum rank of the adapters that it accepts.
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
    """Return the elements of a matrix's A and B in a slot, per unit of rank."""
    return _copies(matrix, layout) * sum(_cut(matrix, layout))


def kv_bytes_per_token(architecture: Architecture, tensor: int) -> int:
    """Return the bytes of one token's keys and values on each GPU of an engine."""
    cached = architecture.cached
    heads = largest_share(cached.heads, tensor)
    return architecture.layers * heads * cached.width * _WEIGHT_BYTES


def _stages(
    architecture: Architecture,
    layout: Layout,
    lora_rank: int | None,
    kernels: Kernels,
    models: int = 1,
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
        tower = architecture.tower if is_first else None
        frozen = parameters + (tower.parameters if tower else 0)
        # 1F1B schedule: stage 0 starts as many micro-batches as there are stages before the first
        # backward pass reaches it.
        kept = kept_per_token(architecture, layout, (layout.pipeline - number) * per_stage)
        # In the longest sequence, all tokens may be of images; joined features are copies.
        kept += tower.features * _WEIGHT_BYTES if tower else 0
        kinds = [layer for layer, _ in runs]
        working = working_per_token(architecture, layout, kinds, lora_rank or 0, kernels)
        yield _Stage(
            weights=frozen * _WEIGHT_BYTES,
            images=tower.image_bytes + _KEPT_FEATURES if tower else 0,
            trained=models
            * _TRAINED_BYTES
            * (parameters if lora_rank is None else lora_rank * width),
            rounded=0 if lora_rank is not None else _rounded(parameters, kinds, layout),
            per_token=kept + working,
            logits=_LOGITS_BYTES if is_last else 0,
            per_token_at_logits=kept + final_per_token(architecture, layout),
        )


def _rounded(parameters: int, layers: list[Layer], layout: Layout) -> int:
    """Return the bytes of weights rounded during a pass; one layer's experts count twice."""
    experts = max(
        sum(_held(matrix, layout) for matrix in layer.matrices if matrix.experts)
        for layer in layers
    )
    return _WEIGHT_BYTES * (parameters + experts)


def _head(architecture: Architecture) -> Matrix:
    return Matrix(architecture.hidden_size, architecture.vocab_size, "column")


def _saved_by_float8(architecture: Architecture, layout: Layout) -> int:
    """Return by how many bytes of a rank float8 weights with scales are smaller than bfloat16.

    Embeddings, output layer, norms and routers are not quantized.
    """
    if architecture.weight_block == 1:
        return 0
    quantized = sum(
        count * sum(_held(matrix, layout) for matrix in layer.matrices)
        for layer, count in architecture.between(0, architecture.layers)
    )
    return quantized - _SCALE_BYTES * quantized // architecture.weight_block**2


def _held(matrix: Matrix, layout: Layout) -> int:
    """Return the number of elements of a matrix that one rank holds."""
    inputs, outputs = _cut(matrix, layout)
    return _copies(matrix, layout) * inputs * outputs


def _undivided_width(architecture: Architecture) -> int:
    """Return the elements of an adapter that every rank holds, per unit of rank."""
    width = _common_width(_head(architecture))
    for layer, count in architecture.between(0, architecture.layers):
        width += count * sum(_common_width(m) for m in layer.matrices if m.adapted)
    return width


def _common_width(matrix: Matrix) -> int:
    """Return the elements of a matrix's A and B that no single expert owns, per unit of rank."""
    if not matrix.experts:
        return matrix.inputs + matrix.outputs
    return matrix.outputs if matrix.split == "row" else matrix.inputs


def _own_width(matrix: Matrix, layout: Layout) -> int:
    """Return the elements that belong to the experts of one rank, per unit of rank."""
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
