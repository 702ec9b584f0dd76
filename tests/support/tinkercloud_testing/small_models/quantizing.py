"""Quantizes saved models to float8 blocks, like DeepSeek's published models."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def quantize(folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Rewrite the linear layers of a saved model as float8 blocks.

    Returns:
        The dequantized weights, by name.
    """
    file, config_file = folder / "model.safetensors", folder / "config.json"
    written, meant = {}, {}
    for name, weight in load_file(file).items():
        meant[name] = written[name] = weight
        if name.endswith(("proj.weight", "_mqa.weight")):
            values, scales, meant[name] = _in_blocks(weight, block)
            written |= {name: values, f"{name}_scale_inv": scales}
    save_file(written, file, {"format": "pt"})
    config = json.loads(config_file.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    config_file.write_text(json.dumps(config))
    return meant


def _in_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return float8 values, the scales of their blocks, and the dequantized values."""
    rows = []
    for row in weight.split(block[0]):
        parts = row.split(block[1], 1)
        scales = [part.abs().max() / torch.finfo(torch.float8_e4m3fn).max for part in parts]
        values = [(part / s).to(torch.float8_e4m3fn) for part, s in zip(parts, scales, strict=True)]
        meant = [part.float() * s for part, s in zip(values, scales, strict=True)]
        rows.append((torch.cat(values, 1), torch.stack(scales), torch.cat(meant, 1)))
    of_values, of_scales, of_meant = zip(*rows, strict=True)
    return torch.cat(of_values), torch.stack(of_scales), torch.cat(of_meant)
