"""What SGLang's own source says of its API: requests, and the reading of tensors.

SGLang itself has no CPU build on PyPI. So its wheel is fetched, never installed nor imported, and
the models of its requests are made from the source in it: a field that SGLang does not know, or of
another type, is refused. Tensors are read and groups are joined by SGLang's own functions, cut out
of its source.
"""

import ast
import base64
import io
import ipaddress
import logging
import pickle
import socket
import subprocess
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Optional, Union

import torch
from pydantic import BaseModel, ConfigDict, create_model

from tinkercloud_testing.inference import cache_folder

SGLANG = "0.5.23"
_REQUESTS = "sglang/srt/managers/io_struct.py"
SAMPLING = "sglang/srt/sampling/sampling_params.py"
_COMMON = "sglang/srt/utils/common.py"
_BUCKET = "sglang/srt/weight_sync/tensor_bucket.py"
_NETWORK = "sglang/srt/utils/network.py"
_UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
_OPTIONS = "sglang/srt/arg_groups/field_order.py"
_PLAIN = {"int": int, "str": str, "float": float, "bool": bool}


def sglang_sources() -> Path:
    """Return a folder with the files of SGLang's wheel that define its API."""
    folder = cache_folder() / f"sglang-{SGLANG}"
    files = [_REQUESTS, SAMPLING, _COMMON, _BUCKET, _NETWORK, _UPDATER, _OPTIONS]
    if not all((folder / file).exists() for file in files):
        place = str(folder / "wheel")
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", place]
        # The workspace's own environment has no pip.
        python = Path(__file__).parents[3] / ".uv" / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", *download, f"sglang=={SGLANG}"], check=True)
        [wheel] = (folder / "wheel").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, files)
        wheel.unlink()
    return folder


@cache
def definition(name: str, file: str = _REQUESTS) -> type[BaseModel]:
    """Return a model of one of SGLang's classes: its fields, their types, and no others."""
    tree = ast.parse((sglang_sources() / file).read_text())
    [found] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    fields: dict[str, Any] = {}
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = ... if node.value is None else None
            fields[node.target.id] = (_type(node.annotation), default)
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(name, __config__=config, **fields)


@cache
def server_options() -> frozenset[str]:
    """Return the options that SGLang's server has, such as `--model-path`."""
    [names] = [
        node.value
        for node in ast.parse((sglang_sources() / _OPTIONS).read_text()).body
        if isinstance(node, ast.Assign)
    ]
    return frozenset("--" + name.replace("_", "-") for name in ast.literal_eval(names))


def _type(node: ast.expr) -> Any:
    """Return the type that an annotation means; Any for SGLang's own."""
    if isinstance(node, ast.Name):
        return _PLAIN.get(node.id, Any)
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return Any
    arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if node.value.id == "Literal":
        return Literal[tuple(ast.literal_eval(argument) for argument in arguments)]
    types = tuple(_type(argument) for argument in arguments)
    match node.value.id:
        case "Optional":
            return Optional[types[0]]  # noqa: UP045 - of a type known at run time only
        case "Union":
            return Union[types]  # noqa: UP007 - as above
        case "Annotated":
            return types[0]
        # JSON has no sets: SGLang makes them of lists.
        case "List" | "Set":
            return list[types[0]]  # type: ignore[valid-type]
        case _:
            return Any


@cache
def own_functions() -> SimpleNamespace:
    """Return what SGLang reads tensors and joins groups with.

    MultiprocessingSerializer, FlattenedTensorBucket, NetworkAddress, init_custom_process_group, and
    methods of WeightUpdater as functions.
    """
    nodes = [
        *_cut(_BUCKET, "FlattenedTensorMetadata", "FlattenedTensorBucket"),
        *_cut(_COMMON, "MultiprocessingSerializer", "SafeUnpickler", "_safe_load_torch_storage"),
        *_cut(_COMMON, "init_custom_process_group"),
        *_cut(_NETWORK, "NetworkAddress", "_is_ipv6", "_wrap"),
        *_cut(
            _UPDATER,
            "init_weights_update_group",
            "destroy_weights_update_group",
            "receive_weights_from_distributed",
            "_receive_bucketed_weights_from_distributed",
        ),
    ]
    # Annotations name classes that are not here.
    lazily = ast.parse("from __future__ import annotations").body
    names = {
        # Dataclasses look their module up by name.
        "__name__": __name__,
        "List": list,
        "Tuple": tuple,
        "dataclass": dataclass,
        "io": io,
        "ipaddress": ipaddress,
        "logger": logging.getLogger(__name__),
        "pickle": pickle,
        "socket": socket,
        "torch": torch,
        "torch_release": tuple(int(part) for part in torch.__version__.split(".")[:2]),
    }
    module = ast.fix_missing_locations(ast.Module([*lazily, *nodes], type_ignores=[]))
    exec(compile(module, "sglang", "exec"), names)  # noqa: S102 - what runs in SGLang
    return SimpleNamespace(**names)


def _cut(file: str, *names: str) -> list[ast.stmt]:
    """Return the definitions of a file that have such names, methods among them."""
    found = [
        node
        for node in ast.walk(ast.parse((sglang_sources() / file).read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
    ]
    assert {node.name for node in found} == set(names), f"{file} has other names than {names}"
    return list(found)


def read_tensors(payload: str) -> dict[str, torch.Tensor]:
    """Read a flattened bucket as an engine's rank does."""
    sglang = own_functions()
    data = sglang.MultiprocessingSerializer.deserialize(base64.b64decode(payload, validate=True))
    bucket = sglang.FlattenedTensorBucket(
        flattened_tensor=data["flattened_tensor"], metadata=data["metadata"]
    )
    return dict(bucket.reconstruct_tensors())
