"""Resolves `--model NAME=WHERE` to a served model."""

import json
from collections.abc import Container, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from tinkercloud_api.config.model_places import PlaceError, folder_at
from tinkercloud_api.providers.base import ServedModel
from tinkercloud_protocol.adapters.context_length import context_length
from tinkercloud_protocol.requests.image_files import IMAGE_MODEL_TYPES

WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
UNWANTED = ("*/*", "consolidated*")
"""Patterns of files that heads load, and of weights in other formats that they do not load."""


class ModelNotFoundError(Exception):
    """A configured model is not on this machine; the message says how to fix it."""


def unknown_model(where: str) -> str:
    """Return an error message for a name that is neither a local folder nor a valid model id."""
    return (
        f"{where!r} is neither a local folder nor a valid Hugging Face model id (NAME or"
        " OWNER/NAME); pass an existing folder or a model id"
    )


def check_aliases(aliases: Mapping[str, str], models: Container[str]) -> None:
    """Check that each alias names a model and is not the name of another.

    Raises:
        ModelNotFoundError: the message names the alias, and what to change.
    """
    for alias, name in aliases.items():
        if name not in models:
            raise ModelNotFoundError(
                f"alias {alias!r}: {name!r} is not among the models to serve; set it to one of"
                f" their names: --alias {alias}=NAME"
            )
        if alias in models:
            raise ModelNotFoundError(
                f"alias {alias!r} is also the name of a model to serve; remove the alias, or serve"
                " the model under another name"
            )


def resolve(name: str, where: str) -> ServedModel:
    """Find a model on this machine.

    Args:
        name: name of the model in the API.
        where: folder in Hugging Face format, or id of a model in the local Hugging Face cache.

    Raises:
        ModelNotFoundError: `where` is neither.
    """
    try:
        folder = folder_at(where)
    except PlaceError as error:
        raise ModelNotFoundError(f"model {name!r}: {error}") from None
    if folder is None:
        try:
            folder = cached(where)
        except HFValidationError:
            raise ModelNotFoundError(f"model {name!r}: {unknown_model(where)}") from None
        except (LocalEntryNotFoundError, FileNotFoundError):
            raise ModelNotFoundError(
                f"model {name!r}: {where!r} is neither a local folder nor in the local Hugging Face"
                f" cache; download it first (`hf download {where}`) or pass a folder:"
                f" --model {name}=/path/to/model"
            ) from None
    config = folder / "config.json"
    content = _read(name, config)
    text, classes = content.get("text_config") or {}, content.get("architectures") or []
    for is_valid, wrong in (
        (isinstance(text, dict), "a text_config that is no object"),
        (isinstance(classes, list), "architectures that are no list"),
    ):
        if not is_valid:
            raise ModelNotFoundError(
                f"model {name!r}: {config} has {wrong}; download the model again"
            )
    return ServedModel(
        name=name,
        max_context_length=context_length({**content, **text}),
        architecture=next(map(str, classes), None),
        local_path=str(folder.absolute()),
        reads_images=reads_images(folder),
    )


def _read(name: str, config: Path) -> dict[str, Any]:
    if not config.is_file() and (packed := sorted(config.parent.glob("*.gguf"))):
        raise ModelNotFoundError(
            f"model {name!r}: {config.parent} has a GGUF file only; convert it with python -m"
            f" tinkercloud_worker.convert_gguf {packed[0]} FOLDER, and pass that folder"
        )
    if not config.is_file():
        raise ModelNotFoundError(
            f"model {name!r}: {config.parent} has no config.json; pass a folder in Hugging Face"
            " format"
        )
    try:
        content = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelNotFoundError(
            f"model {name!r}: {config} is damaged ({error}); download the model again"
        ) from None
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"model {name!r}: {config} is no JSON object; download it again")
    return content


def cached(model_id: str) -> Path:
    """Return the folder of a model in the local Hugging Face cache.

    Raises:
        HFValidationError: it is no model id.
        LocalEntryNotFoundError: the cache does not have it, or not all files that heads load.
    """
    wanted, unwanted = list(WANTED), list(UNWANTED)
    return Path(
        snapshot_download(
            model_id, local_files_only=True, allow_patterns=wanted, ignore_patterns=unwanted
        )
    )


@lru_cache
def reads_images(folder: Path) -> bool:
    """Return whether a head serves the model in a folder with its image processor."""
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    is_known = content.get("model_type") in IMAGE_MODEL_TYPES
    return is_known and (folder / "preprocessor_config.json").is_file()
