"""Downloads the models that a local server is to serve and that are not on this machine.

`python -m tinkercloud_api.serve.model_download NAME WHERE` does it for a running server, which can
end that program, and which reads on its standard output why it has failed.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.file_download import repo_folder_name

from tinkercloud_api.admin import preflight
from tinkercloud_api.admin.preflight import CannotServeError, check_weights
from tinkercloud_api.config.model_places import PlaceError, folder_at
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import ServedModel
from tinkercloud_api.providers.model_arguments import (
    UNWANTED,
    WANTED,
    ModelNotFoundError,
    cached,
    resolve,
)
from tinkercloud_api.providers.model_names import with_aliases
from tinkercloud_api.runs.base_models import ModelFiles, ModelRefusedError

_PICKLED = "pytorch_model*.bin"
"""Weights of a model that has no other ones."""
_ODD = (OSError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What files raise that can't be read, or that have JSON of another form than expected."""


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
        if is_missing(name, where):
            _download(name, where)


def is_missing(name: str, where: str) -> bool:
    """Return whether `where` is a model id, and the cache lacks the model or a part of it."""
    try:
        if folder_at(where) is not None:
            return False
        cached(where)
        check_weights(name, Path(resolve(name, where).local_path or ""))
    except (HFValidationError, PlaceError):
        return False
    except (OSError, ModelNotFoundError, CannotServeError):
        return True
    except _ODD:
        # Another download would be the same.
        return False
    return False


def files_of(settings: Settings) -> ModelFiles:
    """Return what finds, checks and downloads the models of a running server."""

    def checked(name: str, where: str) -> ServedModel:
        try:
            (model,) = with_aliases([resolve(name, where)], settings.aliases)
            preflight.check_models(settings, {name: model.local_path or ""})
        except (ModelNotFoundError, CannotServeError) as error:
            raise ModelRefusedError(str(error)) from None
        except _ODD as error:
            raise ModelRefusedError(
                f"model {name!r}: {where} cannot be read ({type(error).__name__}: {error}); allow"
                " the user of the server to read its files, or download it again"
            ) from None
        return model

    return ModelFiles(is_missing, _download_apart, _downloaded_bytes, checked)


async def _download_apart(name: str, where: str) -> None:
    """Download a model in a process of its own, which ends with this call.

    Raises:
        ModelRefusedError: it failed.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, name, where),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        why = said.decode(errors="replace").strip()
        raise ModelRefusedError(why or f"the download of {where!r} was killed; add it again")


def _downloaded_bytes(where: str) -> int:
    """Return the size of a model's files in the cache, with those that are not complete."""
    folder = repo_folder_name(repo_id=where, repo_type="model")
    size = 0
    for file in (Path(constants.HF_HUB_CACHE) / folder / "blobs").glob("*"):
        # The download renames files when they are complete.
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


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


def main() -> None:
    """Download the model named by the first argument from the place named by the second."""
    name, where = sys.argv[1:]
    try:
        download_missing({name: where})
    except ModelNotFoundError as error:
        sys.stdout.write(str(error))
        sys.exit(1)
    except Exception as error:
        sys.stdout.write(
            f"model {name!r}: the download of {where!r} failed ({type(error).__name__}: {error});"
            " add it again"
        )
        raise


if __name__ == "__main__":
    main()
