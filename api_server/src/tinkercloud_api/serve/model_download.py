"""Downloads the models that a local server is to serve and that are not on this machine."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

from tinkercloud_api.admin.preflight import CannotServeError, check_weights
from tinkercloud_api.providers.model_arguments import (
    UNWANTED,
    WANTED,
    ModelNotFoundError,
    cached,
    resolve,
)

_PICKLED = "pytorch_model*.bin"
"""Weights of a model that has no other ones."""


def download_missing(models: Mapping[str, str]) -> None:
    """Download models into the local Hugging Face cache, with progress on standard error.

    A download that was interrupted continues. Folders, and models in the cache with all their
    weights, are left as they are, without a request to the hub.

    Args:
        models: where each model is, by its name: a folder or a model id. Others are ignored.

    Raises:
        ModelNotFoundError: the hub does not have a model, or does not respond.
    """
    for name, where in models.items():
        if not Path(where).expanduser().is_dir() and _is_missing(name, where):
            _download(name, where)


def _is_missing(name: str, where: str) -> bool:
    """Return whether `where` is a model id, and the cache lacks the model or a part of it."""
    try:
        cached(where)
        check_weights(name, Path(resolve(name, where).local_path or ""))
    except HFValidationError:
        return False
    except (OSError, ModelNotFoundError, CannotServeError):
        return True
    return False


def _download(name: str, where: str) -> None:
    sys.stderr.write(f"Downloading {where} from {constants.ENDPOINT}, once ...\n")
    try:
        folder = _snapshot(where, WANTED)
        if not any(folder.glob("*.safetensors")):
            _snapshot(where, (*WANTED, _PICKLED))
    except OSError as error:
        remedy = "check the name, and set HF_TOKEN for a gated model; a repeated start continues"
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            remedy = "unset HF_HUB_OFFLINE"
        reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
        raise _not_found(name, where, reason, remedy) from None


def _snapshot(where: str, wanted: Sequence[str]) -> Path:
    return Path(
        snapshot_download(where, allow_patterns=list(wanted), ignore_patterns=list(UNWANTED))
    )


def _not_found(name: str, where: str, reason: str, remedy: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"model {name!r}: {where!r} is neither a local folder nor complete in the local Hugging"
        f" Face cache, and cannot be downloaded from {constants.ENDPOINT} ({reason}); {remedy}, or"
        f" pass a folder: --model {name}=/path/to/model"
    )
