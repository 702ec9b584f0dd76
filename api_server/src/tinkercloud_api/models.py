"""From `--model NAME=WHERE` to a served model."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from tinkercloud_api.providers.base import ServedModel


class ModelNotFoundError(Exception):
    """A model that was to be served is not on this machine; the message says what to do."""


def no_such_folder(where: str) -> str:
    """Return what is wrong with a model that is no folder, and can't be one of the hub either."""
    return (
        f"there is no folder {where!r}, nor has the hub models of such a name, which would be NAME"
        " or OWNER/NAME; name a folder that is there, or a model's id"
    )


def resolve(name: str, where: str) -> ServedModel:
    """Find a model on this machine.

    Args:
        name: what SDK users ask for.
        where: a folder in Hugging Face layout, or the id of a model in the local hub cache.

    Raises:
        ModelNotFoundError: it is neither.
    """
    folder = Path(where).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(where, local_files_only=True))
        except HFValidationError:
            raise ModelNotFoundError(f"model {name!r}: {no_such_folder(where)}") from None
        except (LocalEntryNotFoundError, FileNotFoundError):
            raise ModelNotFoundError(
                f"model {name!r}: {where!r} is neither a folder nor a model in the local Hugging"
                f" Face cache. Fetch it first (`hf download {where}`) or name a folder:"
                f" --model {name}=/path/to/model"
            ) from None
    config = folder / "config.json"
    if not config.is_file():
        raise ModelNotFoundError(
            f"model {name!r}: {folder} has no config.json; name a folder in Hugging Face layout"
        )
    content = json.loads(config.read_text())
    return ServedModel(
        name=name,
        max_context_length=int(content.get("max_position_embeddings") or 1 << 20),
        architecture=next(iter(content.get("architectures") or []), None),
        local_path=str(folder.absolute()),
    )
