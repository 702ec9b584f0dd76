"""Checks that a model's weight files match its configuration.

transformers initializes missing weights randomly and ignores unexpected tensors. Both are rejected
here, except in known cases. Names, shapes and dtypes are compared without reading values, so that
other readers of the files (megatron-core, inference engines) can rely on them too.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.model.architecture import (
    BUILDING,
    UnsupportedModelError,
    blank_model_with_towers,
    contradiction,
    keep_text,
    model_class,
    read_config,
    tower_prefixes,
)
from tinkercloud_worker.model.quantized import block_size, files_read, unquantized
from tinkercloud_worker.model.weight_files import (
    OtherFormat,
    StoredTensor,
    UnreadableWeights,
    described_tensors,
    listed,
    stored_tensors,
    weight_files,
)

_PLAIN = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes of weights whose values need nothing else to be understood."""

_DERIVED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|masked_bias|attn\.bias)$")
"""Tensors in old files that models compute by themselves."""
_TOWERS = re.compile(
    r"(^|\.)(visual|vision\w*|image\w*|audio\w*|embed_vision|embed_audio|multi_modal_projector"
    r"|multimodal_projector|mm_projector|patch_merge\w*)\."
)
"""Parts of vision-language models that text never uses."""
_PREDICTORS = re.compile(r"(^|\.)mtp(_\w+)?\.")
"""Multi-token prediction (MTP) layers that have their own name."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.*)")
_OF_PREDICTORS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens"})
"""Modules that only MTP layers have, where these are numbered after the other layers."""
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_HEAD = "lm_head.weight"
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Name suffixes of the two tensors of an MXFP4 weight."""
_LONGEST_REASON = 300
"""Maximum characters of a transformers error quoted in a message."""
_LISTED_LAYERS = 5
_THREADS = 4
_PART_BYTES = 8 << 20
"""Bytes of a tensor read at a time; a multiple of the size of every dtype."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between the tensors of files and of a model."""

    missing: Collection[str]
    """Names of weights that are in no file."""
    unexpected: Collection[str]
    """Names of tensors that the model does not have."""
    mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]
    """Names of tensors with different shapes: in the files and in the model."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expectations of a configuration about weights."""

    layers: int
    is_tied: bool
    has_towers: bool
    """Whether it is a vision-language model."""


def expected_of(config: Any) -> Expected:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the expectations of a Hugging Face configuration."""
    text = config.get_text_config()
    return Expected(
        layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
        has_towers=text is not config,
    )


def differences(found: Comparison, expected: Expected) -> list[str]:
    """Return the problems with a model's files as text; empty if they match the model.

    Tensors that the text model does not use are not a problem: buffers that it computes by itself,
    MTP layers, towers for images and sound.
    """
    unexpected = sorted(set(found.unexpected) - set(_explained(found.unexpected, expected)))
    missing = sorted(found.missing)
    prefix = _common_prefix(unexpected, missing)
    if prefix is not None:
        return [
            f"all names in the files start with {prefix!r}, unlike the model's"
            f" ({listed(unexpected)}); rename the tensors without this prefix"
        ]
    wrong = []
    if missing:
        wrong.append(f"missing in the files: {listed(missing)}")
    if missing == [_HEAD] and not expected.is_tied:
        wrong.append(
            "if the LM head should be tied to the embedding, set tie_word_embeddings to true in"
            " config.json"
        )
    if unexpected:
        wrong.append(f"in the files but not in the model: {listed(unexpected)}")
    shapes = [
        f"{name} {list(theirs)} in the files, {list(ours)} by the configuration"
        for name, theirs, ours in sorted(found.mismatched)
    ]
    if shapes:
        wrong.append(f"with different shapes: {listed(shapes)}")
    return wrong + _layers(unexpected, missing, expected.layers)


def _layers(unexpected: Sequence[str], missing: Sequence[str], layers: int) -> list[str]:
    numbers = [int(match[1]) for name in unexpected if (match := _LAYER.search(name))]
    more = [number for number in numbers if number >= layers]
    if more:
        return [f"num_hidden_layers is {layers}, but the files have layers up to {max(more)}"]
    lost = [int(match[1]) for name in missing if (match := _LAYER.search(name))]
    if len(lost) > 1 and len(lost) == len(missing):
        few = sorted(set(lost))[:_LISTED_LAYERS]
        return [f"num_hidden_layers is {layers}; weights of layers {few} are missing"]
    return []


def _explained(unexpected: Iterable[str], expected: Expected) -> list[str]:
    names = list(unexpected)
    leaves: dict[int, set[str]] = defaultdict(set)
    for name in names:
        if match := _LAYER.search(name):
            leaves[int(match[1])].update(match[2].split("."))
    predictors = {
        number
        for number, parts in leaves.items()
        if number >= expected.layers and parts & _OF_PREDICTORS
    }

    def is_explained(name: str) -> bool:
        match = _LAYER.search(name)
        return bool(
            _DERIVED.search(name)
            or _PREDICTORS.search(name)
            or (expected.has_towers and _TOWERS.search(name))
            or (match and int(match[1]) in predictors)
        )

    return [name for name in names if is_explained(name)]


def _common_prefix(unexpected: Sequence[str], missing: Sequence[str]) -> str | None:
    """Return the prefix that turns all unexpected names into the missing ones, if there is one."""
    common = f"{unexpected[0]}." if unexpected and missing else ""
    while common := common.rpartition(".")[0]:
        if not all(name.startswith(f"{common}.") for name in unexpected):
            continue
        renamed = {name.removeprefix(f"{common}.") for name in unexpected}
        if renamed & set(missing):
            return f"{common}."
    return None


def wrong_experts(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the problems with the individually numbered experts of a mixture.

    transformers stacks the experts that it finds without checking their numbers.

    Args:
        shapes: the shapes of all tensors in the files, by name.
    """
    experts: dict[tuple[str, str], dict[int, Sequence[int]]] = defaultdict(dict)
    for name, shape in shapes.items():
        if match := _EXPERT.fullmatch(name):
            experts[match[1], match[3]][int(match[2])] = shape
    wrong = []
    for (before, after), numbered in experts.items():
        lost = sorted(set(range(max(numbered) + 1)) - numbered.keys())
        if lost:
            wrong.append(f"missing in the files: {before}{lost[0]}{after}")
        elif len({tuple(shape) for shape in numbered.values()}) > 1:
            wrong.append(f"{before}*{after} has different shapes")
    return wrong


def load_checked(
    path: str,
    kind: Any,  # noqa: ANN401 - a class, or one of transformers' that choose it
    expected: Expected,
    **source: Any,  # noqa: ANN401 - of several types
) -> PreTrainedModel:
    """Load a model, and check that the files contained all of its weights.

    Towers for images and sound may be missing in the files; then the model has none.

    Args:
        path: the folder, for messages.
        kind: the class of the model.
        expected: the expectations of the folder's configuration.
        source: arguments of `from_pretrained`.

    Raises:
        UnsupportedModelError: the files do not match the model.
    """
    model: PreTrainedModel
    try:
        model, info = kind.from_pretrained(
            **source, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except torch.OutOfMemoryError:
        raise
    except AssertionError as error:
        raise contradiction(path, error) from error
    except SafetensorError as error:
        raise _refusal(path, [f"a file can't be read ({_in_one_line(error)})"]) from error
    except RuntimeError as error:
        wrong = f"transformers can't convert the weights ({_in_one_line(error)})"
        raise _refusal(path, [wrong]) from error
    removed = tower_prefixes(model)
    if any(name.startswith(removed) for name in _lost(info)):
        # A model whose files lack a tower serves text.
        keep_text(model)
    compared = Comparison(
        [name for name in info["missing_keys"] if not name.startswith(removed)],
        [name for name in info["unexpected_keys"] if not name.startswith(removed)],
        [each for each in info["mismatched_keys"] if not each[0].startswith(removed)],
    )
    _refuse(path, differences(compared, expected))
    return model


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST_REASON]


def _lost(info: Mapping[str, Any]) -> list[str]:
    return [*info["missing_keys"], *(name for name, _, _ in info["mismatched_keys"])]


def _refuse(path: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise _refusal(path, wrong)


def _refusal(path: str, wrong: Sequence[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: the weight files do not match config.json: {'; '.join(wrong)}."
        " Download the model again, or correct config.json or the files"
    )


def check_weights(path: str) -> None:
    """Check names, shapes and dtypes of a folder's weights against its configuration.

    Only headers are read. Weights in quantization formats other than float8 blocks are checked on
    loading.

    Args:
        path: the folder.

    Raises:
        UnsupportedModelError: the weights do not match the model; the message lists the
            differences.
    """
    config = read_config(path)
    if (Path(path) / "adapter_config.json").exists():
        _refuse(
            path,
            ["adapter_config.json: the folder holds an adapter; merge it into its base first"],
        )
    block = block_size(config)
    try:
        tensors = described_tensors(files_read(path, config))
    except OtherFormat as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    except UnreadableWeights as error:
        raise _refusal(path, [str(error)]) from error
    if block is not None:
        tensors, wrong = unquantized(tensors, block)
        _refuse(path, wrong)
    elif getattr(config, "quantization_config", None):
        _refuse(path, _unpaired(tensors))
        return
    config.__dict__.pop("quantization_config", None)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    wrong = wrong_experts(shapes) + _not_float(tensors, config)
    _refuse(path, wrong)
    _compare(path, config, tensors)


def _unpaired(names: Collection[str]) -> list[str]:
    pairs = ((_BLOCKS, _SCALES), (_SCALES, _BLOCKS))
    lost = [
        other
        for name in names
        for end, other_end in pairs
        if name.endswith(end) and (other := name.removesuffix(end) + other_end) not in names
    ]
    return [f"missing in the files: {listed(lost)}"] if lost else []


def _not_float(tensors: Mapping[str, Tensor], config: Any) -> list[str]:  # noqa: ANN401 - as above
    """Return what is wrong with weights of other dtypes than `_PLAIN`, whose values are not known.

    Tensors that the text model does not use may have any dtype, and so may those that are no
    numbers in the model either, such as tables of indexes.
    """
    other = {name: each.dtype for name, each in tensors.items() if each.dtype not in _PLAIN}
    for name in _explained(other, expected_of(config)):
        del other[name]
    if other:
        with BUILDING:
            own = blank_model_with_towers(config).state_dict()
        for name in [name for name in other if name in own]:
            if own[name].dtype == other[name]:
                del other[name]
    if not other:
        return []
    named = [f"{name} ({dtype})" for name, dtype in other.items()]
    accepted = ", ".join(sorted(str(dtype) for dtype in _PLAIN))
    return [
        f"weights must have one of the dtypes {accepted}, and config.json has no"
        f" quantization_config that says what others mean: {listed(named)}; use a copy of the model"
        " in bfloat16"
    ]


def _compare(path: str, config: Any, tensors: dict[str, Tensor]) -> None:  # noqa: ANN401 - as above
    """Match names and shapes with transformers, without reading values."""
    kind, own_config = model_class(config)
    with BUILDING:
        load_checked(
            path,
            kind,
            expected_of(config),
            pretrained_model_name_or_path=None,
            config=own_config,
            state_dict=tensors,
            dtype=torch.float32,
            device_map={"": "meta"},
        )


def check_finite(path: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Check that weights are finite.

    Args:
        path: of the folder, for the message.
        tensors: the tensors, with their names for the message.

    Raises:
        UnsupportedModelError: some are NaN or infinite.
    """
    broken = [name for name, tensor in tensors if not _is_finite(tensor)]
    if broken:
        _refuse(path, [f"NaN or infinite values in {listed(broken)}"])


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # This avoids a boolean tensor of the same size.
    least, greatest = torch.aminmax(tensor if tensor.dtype in _PLAIN else tensor.float())
    return bool(torch.isfinite(least) and torch.isfinite(greatest))


def check_values(path: str) -> None:
    """Read all weights of safetensors files and check that they are finite.

    For folders that are only read by inference engines, which do not check. It takes as long as
    reading the files.

    Raises:
        UnsupportedModelError: some are NaN or infinite.
    """
    files = weight_files(path)
    if files[0].suffix != ".safetensors":
        return

    tensors = stored_tensors(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        finite = dict(zip(tensors, pool.map(_is_stored_finite, tensors.values()), strict=True))
    broken = [name for name, is_finite in finite.items() if not is_finite]
    if broken:
        _refuse(path, [f"NaN or infinite values in {listed(broken)}"])


def _is_stored_finite(stored: StoredTensor) -> bool:
    """Whether all values are finite; only a part of them is in memory at a time."""
    parts = (
        bytearray(stored.read(start, min(_PART_BYTES, stored.size - start)))
        for start in range(0, stored.size, _PART_BYTES)
    )
    return all(_is_finite(torch.frombuffer(part, dtype=stored.dtype)) for part in parts)
