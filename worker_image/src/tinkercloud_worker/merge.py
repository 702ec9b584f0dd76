"""`python -m tinkercloud_worker.merge MODEL ADAPTER FOLDER`: merge an adapter into its base model.

`tinkercloud checkpoints merge` runs it after the download. A tied model is untied first: see
`untie`. Needs PEFT, which heads do not.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tinkercloud_worker.model.architecture import is_tied
from tinkercloud_worker.untie import CannotUntieError, untie


class CannotMergeError(Exception):
    """The adapter can't be merged; the message says why and what to do."""


def merge(model: Path, adapter: Path, folder: Path) -> None:
    """Write a model with the weights of an adapter, in the base model's dtype.

    It is merged in float32 and rounded once, which loses less than merging in bfloat16.

    Args:
        model: folder of a Hugging Face causal language model with weights in safetensors.
        adapter: folder of an adapter of PEFT for this model.
        folder: the destination, which must not exist or be empty.

    Raises:
        CannotMergeError: PEFT is missing, the folder is not empty, the adapter's folder has no
            adapter, or the model can't be untied.
    """
    try:
        from peft import PeftModel  # noqa: PLC0415 - heads do without it
    except ImportError:
        raise CannotMergeError(
            "merging needs PEFT; install it with: pip install peft accelerate"
        ) from None
    if folder.exists() and any(folder.iterdir()):
        raise CannotMergeError(f"{folder} is not empty; choose a folder that does not exist")
    if not (adapter / "adapter_config.json").is_file():
        raise CannotMergeError(f"{adapter} has no adapter: its weights are those of a whole model")
    config = AutoConfig.from_pretrained(model).get_text_config()
    with tempfile.TemporaryDirectory() as temporary:
        base = model
        if is_tied(config):
            base = Path(temporary) / "untied"
            try:
                untie(model, base)
            except CannotUntieError as error:
                raise CannotMergeError(str(error)) from None
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged = PeftModel.from_pretrained(loaded, adapter).merge_and_unload()
        merged.to(config.dtype or torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def main() -> None:
    """Merge what the arguments name."""
    try:
        merge(*map(Path, sys.argv[1:4]))
    except CannotMergeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
