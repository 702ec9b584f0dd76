"""What one GPU must hold, for training and for sampling.

What is assumed of the engines, and which of the figures have been measured, is told in
docs/planning.md. In short: frozen weights are bfloat16; what is trained has a value, a gradient and
two moments in float32, on every data-parallel rank; only the inputs of layers are kept for the
backward pass and the rest is computed again, one layer at a time; with tensor parallelism sequences
are split between layers too; ranks that divide sequences gather a layer's keys and values; logits
exist a few rows at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tinkercloud_crds.planning.architecture import Architecture, Layer, Matrix
from tinkercloud_crds.planning.fleet import Gpu

_WEIGHT_BYTES = 2
_TRAINED_BYTES = 16
"""Value, gradient and two moments of a trained parameter, in float32."""
_STATE_BYTES = 12
"""The same without the gradient."""
_LOW_RANK_BYTES = 4
_LOGIT_BYTES = 4
_LOGITS_BYTES = 256 << 20
"""Logits that training holds at a time; their gradient takes as much again."""
_IMBALANCE = 1.5
"""Tokens that the busiest expert-parallel rank gets, relative to the average."""
_ADAPTER_SLOTS = 2
"""Adapters that an engine holds on its GPUs: the one it samples, and the next."""
_PREFILL_TOKENS = 8192
"""Prompt tokens that an engine reads at a time."""
_DECODING_ROWS = 256
"""Sequences whose logits an engine computes at a time."""


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


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on one GPU, by what they are for."""

    weights: int
    """Frozen weights."""
    trained: int
    """Adapter, or whole model: values, gradient and moments in training, values in sampling."""
    activations: int
    logits: int
    kv_cache: int
    neighbour: int
    """What a trainer keeps while a sampler that shares its GPU runs."""
    reserve: int
    """Not given out: contexts, communication buffers, fragmentation."""

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
    logits: int
    per_token: float
    """Activations for each token of a micro-batch."""

    @property
    def fixed(self) -> int:
        return self.weights + self.trained + self.logits

    def with_tokens(self, tokens: int, reserve: int) -> GpuMemory:
        return GpuMemory(
            weights=self.weights,
            trained=self.trained,
            activations=int(self.per_token * tokens),
            logits=self.logits,
            kv_cache=0,
            neighbour=0,
            reserve=reserve,
        )


def training(
    architecture: Architecture,
    layout: Layout,
    *,
    tokens: int,
    lora_rank: int | None,
    reserve: int = 0,
) -> GpuMemory:
    """Return what the fullest GPU holds at the peak of a training step.

    Args:
        architecture: the model.
        layout: how it is split.
        tokens: of one micro-batch, padding included.
        lora_rank: of the adapter; None for a full fine-tune.
        reserve: bytes that are not given out.
    """
    stages = _stages(architecture, layout, lora_rank)
    return max(
        (stage.with_tokens(tokens, reserve) for stage in stages), key=lambda memory: memory.total
    )


def weight_bytes(architecture: Architecture) -> int:
    """Return the size of all weights together, as they are kept."""
    return _WEIGHT_BYTES * architecture.parameters


def state_bytes(architecture: Architecture, lora_rank: int | None) -> int:
    """Return the size of what is trained, values and moments, without the gradient.

    Args:
        architecture: the model.
        lora_rank: of the adapter; None for a full fine-tune.
    """
    on_one = training(architecture, Layout(), tokens=0, lora_rank=lora_rank)
    return on_one.trained // _TRAINED_BYTES * _STATE_BYTES


def largest_micro_batch(
    architecture: Architecture, layout: Layout, *, available: int, lora_rank: int | None
) -> int:
    """Return how many tokens a micro-batch can have; 0 or less if the model alone is too much.

    Args:
        architecture: the model.
        layout: how it is split.
        available: bytes of each GPU that may be used.
        lora_rank: of the adapter; None for a full fine-tune.
    """
    return min(
        int((available - stage.fixed) / stage.per_token)
        for stage in _stages(architecture, layout, lora_rank)
    )


def sampling(
    architecture: Architecture,
    tensor: int,
    *,
    gpu: Gpu,
    reserve: int,
    lora_rank: int | None,
    neighbour: int = 0,
) -> GpuMemory:
    """Return what a GPU of an engine holds; keys and values get all that is left, if any is.

    Args:
        architecture: the model.
        tensor: GPUs of the engine.
        gpu: what they are.
        reserve: bytes that are not given out.
        lora_rank: of adapters; None for whole models.
        neighbour: bytes that a trainer keeps on the same GPU.
    """
    layout = Layout(tensor=tensor)
    [stage] = _stages(architecture, layout, lora_rank)
    adapters = _ADAPTER_SLOTS * stage.trained * _WEIGHT_BYTES // _TRAINED_BYTES if lora_rank else 0
    reading = max(layer_values(architecture, kind, layout, 0) for kind in _kinds(architecture))
    activations = int(_PREFILL_TOKENS * reading)
    logits = _DECODING_ROWS * architecture.vocab_size * _LOGIT_BYTES
    taken = stage.weights + adapters + activations + logits + neighbour + reserve
    return GpuMemory(
        weights=stage.weights,
        trained=adapters,
        activations=activations,
        logits=logits,
        kv_cache=max(0, gpu.memory - taken),
        neighbour=neighbour,
        reserve=reserve,
    )


def kv_bytes_per_token(architecture: Architecture, tensor: int) -> int:
    """Return the bytes that one token's keys and values take on each GPU of an engine."""
    cached = architecture.cached
    heads = _share(cached.heads, tensor)
    return architecture.layers * heads * cached.width * _WEIGHT_BYTES


def adapter_parameters(architecture: Architecture, rank: int) -> int:
    """Return the elements of a LoRA adapter of all linear layers and the output embedding."""
    layers = [*architecture.leading, *[architecture.repeated] * architecture.repeats]
    whole = Layout()
    head = _adapter(_head(architecture), rank, whole)
    return head + sum(_adapter(m, rank, whole) for layer in layers for m in layer.matrices)


def _stages(architecture: Architecture, layout: Layout, lora_rank: int | None) -> Iterator[_Stage]:
    per_stage = architecture.layers // layout.pipeline
    for number in range(layout.pipeline):
        start = number * per_stage
        runs = architecture.between(start, start + per_stage)
        is_first, is_last = number == 0, number == layout.pipeline - 1
        embeddings = is_first + (is_last and not (is_first and architecture.tied))
        embedding = _held(_head(architecture), layout)
        parameters = embeddings * embedding + (architecture.hidden_size if is_last else 0)
        adapted = _adapter(_head(architecture), lora_rank or 0, layout) if is_last else 0
        for layer, count in runs:
            held = sum(_held(matrix, layout) for matrix in layer.matrices)
            parameters += count * (held + layer.others)
            adapted += count * sum(_adapter(m, lora_rank or 0, layout) for m in layer.matrices)
        yield _Stage(
            weights=parameters * _WEIGHT_BYTES,
            trained=(parameters if lora_rank is None else adapted) * _TRAINED_BYTES,
            logits=2 * _LOGITS_BYTES if is_last else 0,
            per_token=_activations_per_token(
                architecture,
                layout,
                runs,
                # One forward, one backward: stage 0 has begun as many micro-batches as there are
                # stages before the first of them comes back.
                in_flight=layout.pipeline - number,
                lora_rank=lora_rank or 0,
                unembeds=is_last,
            ),
        )


def _activations_per_token(
    architecture: Architecture,
    layout: Layout,
    runs: list[tuple[Layer, int]],
    *,
    in_flight: int,
    lora_rank: int,
    unembeds: bool,
) -> float:
    """Return the bytes of activations that a token of a micro-batch takes on one GPU."""
    hidden = architecture.hidden_size * _WEIGHT_BYTES
    kept = in_flight * sum(count for _, count in runs) * hidden / layout.tensor
    # Every value of the layer that is computed again has a gradient at some time.
    working = 2 * max(layer_values(architecture, layer, layout, lora_rank) for layer, _ in runs)
    # Hidden state and its gradient, and the final norm in float32.
    final = 4 * hidden if unembeds else 0
    # Keys and values of whole sequences, and their gradients, are at every rank of those.
    cached = kv_bytes_per_token(architecture, layout.tensor) / architecture.layers
    gathered = 2 * cached if layout.context > 1 else 0
    return (kept + working + final) / layout.context + gathered


def layer_values(architecture: Architecture, layer: Layer, layout: Layout, lora_rank: int) -> float:
    """Return the bytes per token that a layer's backward pass needs of its forward pass.

    Args:
        architecture: the model.
        layer: one of its layers.
        layout: how it is split; the sequence is taken as whole.
        lora_rank: of the adapter; 0 for none.
    """
    hidden = architecture.hidden_size
    # A norm keeps its input in float32 and its output; what enters a matrix is gathered.
    gathered, split = 2 * hidden, (3 * layer.norms - 2) * hidden
    sent = layer.mlp_width / layout.tensor + 2 * hidden * layer.copies
    busiest = _IMBALANCE if layout.expert > 1 else 1.0
    width = gathered + (split + layer.attention_width) / layout.tensor + busiest * sent
    return _WEIGHT_BYTES * width + _LOW_RANK_BYTES * lora_rank * len(layer.matrices)


def _kinds(architecture: Architecture) -> list[Layer]:
    return [*architecture.leading[:1], architecture.repeated]


def _head(architecture: Architecture) -> Matrix:
    return Matrix(architecture.hidden_size, architecture.vocab_size, "column")


def _held(matrix: Matrix, layout: Layout) -> int:
    """Return the elements of a matrix that one rank holds."""
    inputs, outputs = _cut(matrix, layout)
    return _copies(matrix, layout) * inputs * outputs


def _adapter(matrix: Matrix, rank: int, layout: Layout) -> int:
    """Return the elements of a matrix's A and B that one rank holds."""
    inputs, outputs = _cut(matrix, layout)
    share = max(1, rank // matrix.chosen)
    return _copies(matrix, layout) * share * (inputs + outputs)


def _cut(matrix: Matrix, layout: Layout) -> tuple[int, int]:
    match matrix.split:
        case "column":
            return matrix.inputs, _share(matrix.outputs, layout.tensor)
        case "row":
            return _share(matrix.inputs, layout.tensor), matrix.outputs
        case "whole":
            return matrix.inputs, matrix.outputs


def _copies(matrix: Matrix, layout: Layout) -> int:
    return _share(matrix.experts, layout.expert) if matrix.experts else 1


def _share(size: int, ranks: int) -> int:
    """Return the largest part when something is divided as evenly as it can be."""
    return -(-size // ranks)
