"""A model's state to and from the files of a checkpoint; the layout is `protocol.checkpoints`.

Everything is safetensors or JSON, so nothing is ever unpickled, and nothing names a trainer
backend or a parallel layout: any trainer can read what another wrote.
"""

import json
from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save

from tinkercloud_protocol.checkpoints import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FULL_WEIGHTS,
    OPTIMIZER_STATE,
    TRAINER_STATE,
    Manifest,
)
from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_worker import lora
from tinkercloud_worker.engine.trainer import TrainingState, WeightsSnapshot

Files = dict[str, bytes]


def encode_weights(weights: WeightsSnapshot, base_model: str) -> Files:
    """Return the files of a sampler checkpoint. An adapter is loadable by PEFT as it is."""
    if weights.lora is None:
        return {FULL_WEIGHTS: save(dict(weights.tensors))}
    return {
        ADAPTER_WEIGHTS: save(lora.to_peft_names(weights.tensors)),
        ADAPTER_CONFIG: lora.peft_config(weights.lora, weights.tensors, base_model),
    }


def encode_state(state: TrainingState, base_model: str) -> Files:
    """Return the files of a training checkpoint."""
    return {
        **encode_weights(state.weights, base_model),
        OPTIMIZER_STATE: save(dict(state.moments or {})),
        TRAINER_STATE: json.dumps({"step": state.step}).encode(),
    }


def files_of_weights(manifest: Manifest) -> list[str]:
    """Return the names of the files that `decode_weights` reads."""
    return [FULL_WEIGHTS if manifest.lora is None else ADAPTER_WEIGHTS]


def files_of_state(manifest: Manifest) -> list[str]:
    """Return the names of the files that `decode_state` reads.

    Raises:
        InvalidRequest: the checkpoint has no optimizer state.
    """
    if OPTIMIZER_STATE not in manifest.files:
        raise InvalidRequest(
            f"{manifest.tinker_path} holds weights only: load it without optimizer state, or load"
            " a checkpoint made by save_state"
        )
    return [*files_of_weights(manifest), OPTIMIZER_STATE, TRAINER_STATE]


def decode_weights(manifest: Manifest, files: Mapping[str, bytes]) -> WeightsSnapshot:
    """Read weights back.

    Raises:
        InvalidRequest: the file is not safetensors.
    """
    (name,) = files_of_weights(manifest)
    try:
        tensors = lora.from_peft_names(load(files[name]))
    except SafetensorError as error:
        raise InvalidRequest(f"{manifest.tinker_path}: {name} is damaged ({error})") from None
    return WeightsSnapshot(manifest.lora, tensors)


def decode_state(manifest: Manifest, files: Mapping[str, bytes]) -> TrainingState:
    """Read a training state back, with moments if their file is among `files`.

    Raises:
        InvalidRequest: a file is not what its name says.
    """
    weights = decode_weights(manifest, files)
    if OPTIMIZER_STATE not in files:
        return TrainingState(weights, moments=None, step=0)
    try:
        moments = load(files[OPTIMIZER_STATE])
        step = int(json.loads(files[TRAINER_STATE])["step"])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{manifest.tinker_path}: its optimizer state is damaged ({error})"
        ) from None
    return TrainingState(weights, moments, step)
