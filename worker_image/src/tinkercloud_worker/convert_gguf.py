"""`python -m tinkercloud_worker.convert_gguf FILE FOLDER`: convert GGUF to a Hugging Face folder.

transformers de-quantizes GGUF files itself, but slowly. The converted folder loads quickly and is
not quantized. An existing folder is left unchanged. Each step is printed on standard error.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tinkercloud_worker.model.weight_files import share_weights
from tinkercloud_worker.model.weights_check import check_finite, expected_of, load_checked


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the folder, atomically.

    Raises:
        UnsupportedModelError: the weights do not match the model that the file describes.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    source, name = str(gguf_file.parent), gguf_file.name
    _say(f"reading {gguf_file} ({gguf_file.stat().st_size >> 20} MiB) and de-quantizing it ...")
    config = AutoConfig.from_pretrained(source, gguf_file=name)
    quantized = load_checked(
        str(gguf_file),
        AutoModelForCausalLM,
        expected_of(config),
        pretrained_model_name_or_path=source,
        gguf_file=name,
        dtype=torch.float32,
    )
    config = quantized.config
    check_finite(str(gguf_file), quantized.named_parameters())
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    _say(f"writing {folder} ...")
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(temporary)
        finished = Path(temporary) / "model"
        finished.mkdir()
        for file in [entry for entry in Path(temporary).iterdir() if entry.is_file()]:
            file.rename(finished / file.name)
        share_weights(finished)
        try:
            finished.rename(folder)
        except OSError:
            # Two conversions may race: the first one wins, and the result of the other is dropped.
            if not folder.exists():
                raise


def _say(step: str) -> None:
    sys.stderr.write(f"{step}\n")
    sys.stderr.flush()


def main() -> None:
    """Convert the file named by the first argument to the folder named by the second."""
    convert(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
