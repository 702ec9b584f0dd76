"""`python -m tinkercloud_worker.merge MODEL ADAPTER FOLDER`: merge an adapter into its base model.

`tinkercloud checkpoints merge` runs it after the download. A tied model is untied first: see
`untie`. Needs PEFT, which heads do not.
"""

import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from tinkercloud_worker.model.architecture import is_tied
from tinkercloud_worker.model.weight_files import share_weights
from tinkercloud_worker.untie import CannotUntieError, untie

if TYPE_CHECKING:
    from peft import PeftModel

_REMEDY = "pass the base model that it was trained on"
_LONGEST_REASON = 300


class CannotMergeError(Exception):
    """The adapter can't be merged; the message says why and what to do."""


def merge(
    model: Path, adapter: Path, folder: Path, report: Callable[[str], object] = lambda _step: None
) -> None:
    """Write a model with the weights of an adapter, in the base model's dtype.

    It is merged in float32 and rounded once, which loses less than merging in bfloat16.

    Args:
        model: folder of a Hugging Face causal language model with weights in safetensors.
        adapter: folder of an adapter of PEFT for this model.
        folder: the destination, which must not exist or be empty.
        report: is called with each step at its start.

    Raises:
        CannotMergeError: PEFT is missing, the folder is not empty, the adapter's folder has no
            adapter, the adapter is that of another model, or the model can't be untied.
    """
    if importlib.util.find_spec("peft") is None:
        raise CannotMergeError("merging needs PEFT; install it with: pip install peft accelerate")
    if folder.exists() and any(folder.iterdir()):
        raise CannotMergeError(f"{folder} is not empty; choose a folder that does not exist")
    if not (adapter / "adapter_config.json").is_file():
        raise CannotMergeError(f"{adapter} has no adapter: its weights are those of a whole model")
    config = AutoConfig.from_pretrained(model).get_text_config()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=folder.parent) as temporary:
        base, written = model, Path(temporary) / "merged"
        if is_tied(config):
            base = Path(temporary) / "untied"
            report("copying the base model, to untie its embeddings")
            try:
                untie(model, base)
            except CannotUntieError as error:
                raise CannotMergeError(str(error)) from None
        report("loading the base model")
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        report("merging the adapter")
        merged = _adapted(loaded, adapter, model).merge_and_unload()
        report("writing the merged model")
        merged.to(config.dtype or torch.float32).save_pretrained(written)
        AutoTokenizer.from_pretrained(model).save_pretrained(written)
        share_weights(written)
        written.rename(folder)


def _adapted(loaded: PreTrainedModel, adapter: Path, model: Path) -> "PeftModel":
    """Return a model with an adapter, all of whose tensors it has taken, and no others.

    Raises:
        CannotMergeError: the adapter is that of another model.
    """
    from peft import PeftModel  # noqa: PLC0415 - heads do without it

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")
            adapted = PeftModel.from_pretrained(loaded, adapter)
        # Only this returns what did not fit; PEFT merges the rest without an error.
        result = adapted.load_adapter(adapter, "default", torch_device="cpu")
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise CannotMergeError(f"the adapter does not fit {model} ({reason}); {_REMEDY}") from None
    for names, what in [
        (result.unexpected_keys, "the model has no place for"),
        (result.missing_keys, "the adapter lacks"),
    ]:
        if names:
            more = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise CannotMergeError(
                f"the adapter does not fit {model}: {what} {names[0]}{more}; {_REMEDY}"
            )
    return adapted


def _warn(
    message: Warning | str, category: type[Warning], *_place: object, **_line: object
) -> None:
    """Print a warning without the place in the code, unless it is for programmers."""
    if not issubclass(category, DeprecationWarning | FutureWarning | PendingDeprecationWarning):
        sys.stderr.write(f"{category.__name__}: {message}\n")


def main() -> None:
    """Merge what the arguments name and print the steps; standard error has warnings only."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.showwarning = _warn
    try:
        model, adapter, folder = map(Path, sys.argv[1:4])
        merge(model, adapter, folder, partial(print, flush=True))
    except CannotMergeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
