"""`python -m tinkercloud_worker.untie MODEL FOLDER`: copy a model with a separate output layer.

Many models are tied: one weight is both their embedding and their output layer. An adapter that
trains the output layer changes only the output, so it can't be merged into a tied model. It can be
merged into the untied copy that this program writes: the same model with a separate output layer.
Tools that merge adapters (`build_hf_model` of the cookbook, `merge_and_unload` of PEFT) accept the
copy as the base model.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from tinkercloud_worker.model.architecture import is_tied
from tinkercloud_worker.model.weight_files import share_weights

_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_WHOLE = "model.safetensors"
_FIRST = "model-00001-of-00002.safetensors"
"""New name of a single weights file: `model.safetensors` would be read without the others."""
_HEAD_FILE = "model-lm_head.safetensors"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_HEAD = "lm_head.weight"
_OF_WRAPPED_MODEL = "language_model.model."
"""Prefix of the text model's tensors in models whose output layer has a prefix too."""


class CannotUntieError(Exception):
    """The folder is not a tied model that can be copied; the message says why."""


def untie(model: Path, folder: Path) -> None:
    """Write an untied copy of a tied model, atomically.

    Args:
        model: folder of a Hugging Face model with weights in safetensors.
        folder: the destination, which must not exist.

    Raises:
        CannotUntieError: the model is not tied, its weights are not in safetensors, its embedding
            is not found, or the folder exists.
    """
    if folder.exists():
        raise CannotUntieError(f"{folder} already exists; choose a folder that does not exist")
    if not is_tied(AutoConfig.from_pretrained(model).get_text_config()):
        raise CannotUntieError(f"{model} is not tied; merge adapters into it directly")
    files = sorted(model.glob("*.safetensors"))
    names = {name: file for file in files for name in _names_in(file)}
    embedding = _embedding_among(names, model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        copy = Path(temporary) / "model"
        # Without weights in other formats, which would be read instead.
        shutil.copytree(
            model, copy, ignore=shutil.ignore_patterns("*.bin", "*.pt", "*.pth", "*.gguf", _INDEX)
        )
        if (copy / _WHOLE).exists():
            (copy / _WHOLE).rename(copy / _FIRST)
        places = {
            name: _FIRST if file.name == _WHOLE else file.name for name, file in names.items()
        }
        _add_head(copy, names[embedding], embedding, places)
        _write_config(copy)
        share_weights(copy)
        copy.rename(folder)


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _embedding_among(names: dict[str, Path], model: Path) -> str:
    found = [name for name in names if name.endswith(_EMBEDDINGS)]
    if len(found) != 1:
        raise CannotUntieError(
            f"{model}: expected exactly one tensor in safetensors whose name ends in"
            f" {' or '.join(_EMBEDDINGS)}, found {found or 'none'}"
        )
    return found[0]


def _add_head(copy: Path, file: Path, embedding: str, places: dict[str, str]) -> None:
    """Write the output layer, unless the files contain it, and the index of all files."""
    prefix = "language_model." if embedding.startswith(_OF_WRAPPED_MODEL) else ""
    head = f"{prefix}{_HEAD}"
    if head not in places:
        with safe_open(file, framework="pt") as tensors:
            weight = tensors.get_tensor(embedding)
        save_file({head: weight}, copy / _HEAD_FILE, metadata={"format": "pt"})
        places[head] = _HEAD_FILE
    size = sum((copy / name).stat().st_size for name in set(places.values()))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (copy / _INDEX).write_text(json.dumps(index, indent=2))


def _write_config(copy: Path) -> None:
    config = json.loads((copy / _CONFIG).read_text())
    for part in (config, config.get("text_config")):
        if part is not None:
            part["tie_word_embeddings"] = False
    (copy / _CONFIG).write_text(json.dumps(config, indent=2))


def main() -> None:
    """Copy the model named by the first argument to the folder named by the second."""
    try:
        model, folder = map(Path, sys.argv[1:])
    except ValueError:
        sys.exit("usage: python -m tinkercloud_worker.untie MODEL FOLDER")
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    sys.stdout.write(f"copying {size / 2**30:.1f} GiB of weights ...\n")
    sys.stdout.flush()
    try:
        untie(model, folder)
    except CannotUntieError as error:
        sys.exit(str(error))
    sys.stdout.write(f"wrote {folder}\n")


if __name__ == "__main__":
    main()
