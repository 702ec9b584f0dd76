"""Faults of model folders whose files do not match the configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkercloud_testing.small_models.quantizing import quantize

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
UP = "model.layers.1.mlp.up_proj.weight"

Fault = Callable[[Path], object]
"""Introduces a fault into a folder."""


def weights(change: Callable[[dict[str, Tensor]], object]) -> Fault:
    """Return a fault that changes the tensors of the only file."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        change(tensors)
        save_file(tensors, folder / FILE, {"format": "pt"})

    return apply


def lost(name: str) -> Fault:
    return weights(lambda tensors: tensors.pop(name))


def added(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Fault:
    return weights(lambda tensors: tensors.update({name: torch.zeros(shape).to(dtype)}))


def prefixed(prefix: str) -> Fault:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return weights(rename)


def value(name: str, number: float) -> Fault:
    return weights(lambda tensors: tensors[name].view(-1)[3:4].fill_(number))


def shape(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    return weights(lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))


def configured(**fields: Any) -> Fault:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config.get("text_config", config).update(fields)
        file.write_text(json.dumps(config))

    return apply


def layers(count: int) -> Fault:
    return configured(num_hidden_layers=count, layer_types=["full_attention"] * count)


def in_shards(folder: Path) -> None:
    """Split the file in two, with an index."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    for file, part in zip(SHARDS, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    files = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def indexed(change: Callable[[dict[str, str]], object]) -> Fault:
    def apply(folder: Path) -> None:
        in_shards(folder)
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def twice(folder: Path) -> None:
    in_shards(folder)
    first, second = (load_file(folder / file) for file in SHARDS)
    name = next(iter(first))
    save_file(second | {name: first[name]}, folder / SHARDS[1], {"format": "pt"})


def cut_short(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])


def stale_single(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    in_shards(folder)
    (folder / FILE).write_bytes(content)


def pickled(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    del tensors[UP]
    torch.save(tensors, folder / "pytorch_model.bin")


def renumbered(tensors: dict[str, Tensor]) -> None:
    """Increase the number of the last expert of a layer by one."""
    for name in [name for name in tensors if ".layers.0." in name and ".experts.3." in name]:
        tensors[name.replace(".experts.3.", ".experts.4.")] = tensors.pop(name)


def with_an_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def without_weights(folder: Path) -> None:
    (folder / FILE).unlink()


def a_gguf_file(folder: Path) -> None:
    without_weights(folder)
    (folder / "model.gguf").write_bytes(b"GGUF")


def a_hole(folder: Path) -> None:
    """Leave unused bytes behind the tensors, which only the library of safetensors refuses."""
    with (folder / FILE).open("ab") as file:
        file.write(bytes(16))


def a_web_page(folder: Path) -> None:
    (folder / FILE).write_bytes(b"<html>not found</html>")


def of_another_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "acme"}))


def in_float8(change: Callable[[dict[str, Tensor]], object]) -> Fault:
    def apply(folder: Path) -> None:
        quantize(folder, (16, 16))
        weights(change)(folder)

    return apply


def expert(number: int) -> str:
    return f"model.layers.1.mlp.experts.{number}.down_proj.weight"


def _without_first_part(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


without_first_part = weights(_without_first_part)
"""Name weights as those of a backbone alone, which only transformers accepts."""
