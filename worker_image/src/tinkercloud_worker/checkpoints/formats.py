"""Encodes and decodes the files of a checkpoint; `protocol.checkpoints` describes the layout.

All files are safetensors or JSON, so nothing is ever unpickled. They are independent of trainer
backend and parallel layout: any trainer can read the checkpoints of any other.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from tinkercloud_protocol.heads.checkpoint_manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FULL_WEIGHTS,
    GRADIENT,
    OPTIMIZER_STATE,
    TRAINER_STATE,
    CheckpointManifest,
    SuspendedManifest,
)
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.checkpoints import tensor_file
from tinkercloud_worker.engine.trainer import Gradient, TrainingState, WeightsCopy
from tinkercloud_worker.lora import adapters, imported_adapters

Files = dict[str, bytes]
Contents = Mapping[str, bytes | memoryview]
"""Contents of files by name."""
Put = Callable[[str, Callable[[tensor_file.Growing], object]], None]
"""Stores a file, given its name and what writes its content."""
AnyManifest = CheckpointManifest | SuspendedManifest
SAMPLER_PREFIX = "sampler-"


def encode_weights(weights: WeightsCopy, base_model: str) -> Files:
    """Return the files of a sampler checkpoint.

    PEFT can load an adapter directly, unless it adapts experts: those are stacked, as in Tinker's
    archives, and `tinker_cookbook.weights` converts them for PEFT.
    """
    if weights.lora is None:
        return {FULL_WEIGHTS: tensor_file.encode(weights.tensors)}
    return _adapter_files(weights.lora, adapters.to_archive_names(weights.tensors), base_model)


def encode_for_servers(weights: WeightsCopy, base_model: str) -> Files:
    """Return an adapter's files for inference servers, with separate experts.

    Args:
        weights: the adapter.
        base_model: name of the base model.
    """
    assert weights.lora is not None  # noqa: S101 - full models are written by `inference.weights_folder`
    return _adapter_files(weights.lora, adapters.to_peft_names(weights.tensors), base_model)


def _adapter_files(config: LoraConfig, named: dict[str, Tensor], base_model: str) -> Files:
    return {
        ADAPTER_WEIGHTS: tensor_file.encode(named),
        ADAPTER_CONFIG: adapters.peft_config(config, named, base_model),
    }


def encode_training(state: TrainingState, gradient: Gradient | None, base_model: str) -> Files:
    """Return the files of a training checkpoint.

    Args:
        state: weights, moments and step.
        gradient: the unapplied gradient; None if there is none.
        base_model: name of the base model.
    """
    files = encode_state(state, base_model)
    return files if gradient is None else {**files, GRADIENT: encode_tensors(gradient)}


def encode_state(state: TrainingState, base_model: str) -> Files:
    """Return the files of a model's state, without its gradient."""
    return {
        **encode_weights(state.weights, base_model),
        OPTIMIZER_STATE: tensor_file.encode(state.moments or {}),
        TRAINER_STATE: _trainer_state(state),
    }


def write_whole_state(state: TrainingState, put: Put) -> None:
    """Write the files of `encode_state`, of a fully fine-tuned model, with no copy in memory.

    Args:
        state: weights, moments and step.
        put: stores the files.
    """
    put(FULL_WEIGHTS, partial(tensor_file.write, state.weights.tensors))
    put(OPTIMIZER_STATE, partial(tensor_file.write, state.moments or {}))
    put(TRAINER_STATE, lambda file: file.write(_trainer_state(state)))


def _trainer_state(state: TrainingState) -> bytes:
    return json.dumps({"step": state.step}).encode()


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a file with these tensors."""
    return tensor_file.encode(tensors)


def encode_sampler(weights: WeightsCopy) -> tuple[str, bytes]:
    """Return the name and content of a file with weights; equal weights have equal names."""
    content = encode_tensors(weights.tensors)
    return f"{SAMPLER_PREFIX}{hashlib.sha256(content).hexdigest()[:32]}.safetensors", content


def files_of_weights(manifest: AnyManifest) -> list[str]:
    """Return the names of the files that `decode_weights` reads."""
    return [FULL_WEIGHTS if manifest.lora is None else ADAPTER_WEIGHTS]


def files_of_training(manifest: CheckpointManifest) -> list[str]:
    """Return the names of the files needed to resume training. Raises as `files_of_state`."""
    gradient = [GRADIENT] if GRADIENT in manifest.files else []
    return [*files_of_state(manifest), *gradient]


def files_of_state(manifest: AnyManifest) -> list[str]:
    """Return the names of the files that `decode_state` reads.

    Raises:
        InvalidRequest: the checkpoint has no optimizer state.
    """
    if OPTIMIZER_STATE not in manifest.files:
        raise InvalidRequest(
            f"{manifest} contains no optimizer state; load it without the optimizer, or load a"
            " checkpoint written by save_state"
        )
    return [*files_of_weights(manifest), OPTIMIZER_STATE, TRAINER_STATE]


def decode_weights(manifest: AnyManifest, files: Contents) -> WeightsCopy:
    """Decode weights. Those of an imported adapter may lack some (`model.imported_weights`).

    Raises:
        InvalidRequest: the file is not valid safetensors, or is an imported one whose experts do
            not share what they must.
    """
    (name,) = files_of_weights(manifest)
    tensors = decode_tensors(manifest, files, name)
    adapter = manifest.imported if isinstance(manifest, CheckpointManifest) else None
    if adapter is None or manifest.lora is None:
        return WeightsCopy(manifest.lora, adapters.from_archive_names(tensors))
    named = imported_adapters.from_file(tensors, adapter.scale, manifest.lora.rank)
    return WeightsCopy(manifest.lora, named)


def decode_to_sample(manifest: AnyManifest, files: Contents, dtype: str) -> WeightsCopy:
    """Decode weights that are only sampled from.

    Args:
        manifest: the checkpoint's manifest.
        files: the checkpoint's files.
        dtype: name of the torch dtype that a full model is rounded to.

    Raises:
        InvalidRequest: the file is not valid safetensors.
    """
    weights = decode_weights(manifest, files)
    if weights.lora is not None:
        return weights
    rounded = {name: each.to(getattr(torch, dtype)) for name, each in weights.tensors.items()}
    return WeightsCopy(None, rounded)


def decode_tensors(manifest: AnyManifest, files: Contents, name: str) -> dict[str, Tensor]:
    """Decode one file. The tensors share its memory and must not be written to.

    Raises:
        InvalidRequest: the file is not valid safetensors.
    """
    return decode_stored(f"{manifest}: {name}", files[name])


def decode_stored(what: str, content: bytes | memoryview) -> dict[str, Tensor]:
    """Decode a file with tensors, as `decode_tensors`; `what` names it in the error."""
    try:
        return tensor_file.decode(content)
    except ValueError as error:
        raise InvalidRequest(f"{what} is damaged ({error})") from None


def decode_gradient(manifest: AnyManifest, files: Contents) -> Gradient | None:
    """Decode the gradient; None if its file is not in `files`. Raises as `decode_tensors`."""
    return decode_tensors(manifest, files, GRADIENT) if GRADIENT in files else None


def decode_state(manifest: AnyManifest, files: Contents) -> TrainingState:
    """Decode a training state, with moments if their file is in `files`.

    Raises:
        InvalidRequest: a file is damaged.
    """
    weights = decode_weights(manifest, files)
    if OPTIMIZER_STATE not in files:
        return TrainingState(weights, moments=None, step=0)
    try:
        moments = tensor_file.decode(files[OPTIMIZER_STATE])
        step = int(json.loads(bytes(files[TRAINER_STATE]))["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{manifest}: its optimizer state is damaged ({error})") from None
    return TrainingState(weights, moments, step)
