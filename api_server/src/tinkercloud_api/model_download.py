"""Downloads the models that a local server is to serve and that are not on this machine."""

import sys
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from tinkercloud_api.models import ModelNotFoundError, resolve
from tinkercloud_api.preflight import CannotServeError, check_weights

_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_UNWANTED = ("*/*", "consolidated*")
"""Weights in other formats, which heads do not load."""


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
        if not Path(where).expanduser().is_dir() and _is_id(where) and not _is_cached(name, where):
            _download(name, where)


def _is_id(where: str) -> bool:
    try:
        validate_repo_id(where)
    except HFValidationError:
        return False
    return True


def _is_cached(name: str, where: str) -> bool:
    try:
        check_weights(name, Path(resolve(name, where).local_path or ""))
    except (ModelNotFoundError, CannotServeError):
        return False
    return True


def _download(name: str, where: str) -> None:
    sys.stderr.write(f"Downloading {where} from {constants.ENDPOINT}, once ...\n")
    try:
        snapshot_download(where, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED))
    except OfflineModeIsEnabled:
        remedy = "unset HF_HUB_OFFLINE"
        raise _not_found(name, where, "downloads are disabled", remedy) from None
    except OSError as error:
        reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
        remedy = "check the name, and set HF_TOKEN for a gated model; a repeated start continues"
        raise _not_found(name, where, reason, remedy) from None


def _not_found(name: str, where: str, reason: str, remedy: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"model {name!r}: {where!r} is neither a local folder nor complete in the local Hugging"
        f" Face cache, and cannot be downloaded from {constants.ENDPOINT} ({reason}); {remedy}, or"
        f" pass a folder: --model {name}=/path/to/model"
    )
