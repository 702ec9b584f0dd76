"""SGLang's API from its own source: requests, responses, and the reading of tensors.

SGLang itself has no CPU build on PyPI. So its wheel is fetched, never installed nor imported, and
the models of its messages are made from the source in it: a field that SGLang does not know, or of
another type, is refused. Tensors are read and groups are joined by SGLang's own functions, cut out
of its source; `sglang_server` cuts out those that answer over HTTP.
"""

import ast
import email
import io
import ipaddress
import logging
import os
import pickle
import socket
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, GenericAlias, SimpleNamespace
from typing import Any, Literal, Optional, Union

import torch
from pydantic import BaseModel, ConfigDict, create_model

from tinkercloud_testing.inference import cache_folder

SGLANG = "0.5.23"
_MESSAGES = "sglang/srt/managers/io_struct.py"
SAMPLING = "sglang/srt/sampling/sampling_params.py"
COMMON = "sglang/srt/utils/common.py"
ROUTES = "sglang/srt/entrypoints/http_server.py"
CONTRACT = "sglang/srt/entrypoints/api_contract.py"
API_TYPES = "sglang/api/v1/api_types.py"
MANAGER = "sglang/srt/managers/tokenizer_manager.py"
CONTROL = "sglang/srt/managers/tokenizer_control_mixin.py"
COMMUNICATOR = "sglang/srt/managers/communicator.py"
BATCH = "sglang/srt/managers/schedule_batch.py"
REGISTRY = "sglang/srt/lora/lora_registry.py"
LOCKS = "sglang/srt/utils/aio_rwlock.py"
WEIGHT_UPDATER = "sglang/srt/managers/scheduler_components/weight_updater.py"
FLUSHING = "sglang/srt/managers/scheduler_components/flush_wrapper.py"
_BUCKET = "sglang/srt/weight_sync/tensor_bucket.py"
_NETWORK = "sglang/srt/utils/network.py"
_UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
_OPTIONS = "sglang/srt/arg_groups/field_order.py"
_VARIABLES = "sglang/srt/environ.py"
_METADATA = f"sglang-{SGLANG}.dist-info/METADATA"
_FILES = (
    *(_MESSAGES, SAMPLING, COMMON, ROUTES, CONTRACT, API_TYPES, MANAGER, CONTROL, COMMUNICATOR),
    *(
        BATCH,
        REGISTRY,
        LOCKS,
        WEIGHT_UPDATER,
        FLUSHING,
        _BUCKET,
        _NETWORK,
        _UPDATER,
        _OPTIONS,
        _VARIABLES,
        _METADATA,
    ),
)
_PLAIN = {"int": int, "str": str, "float": float, "bool": bool}


def sglang_sources() -> Path:
    """Return a folder with the files of SGLang's wheel that define its API."""
    # Pods of engines set XDG_CACHE_HOME, so the image of the fake engine names its folder.
    named = os.environ.get("TINKERCLOUD_TEST_SGLANG_SOURCES")
    folder = Path(named) if named else cache_folder() / f"sglang-{SGLANG}"
    if all((folder / file).exists() for file in _FILES):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # Other test processes may download the same files and be killed: write atomically.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", place]
        # The workspace's own environment has no pip.
        python = Path(__file__).parents[3] / ".uv" / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", *download, f"sglang=={SGLANG}"], check=True)
        [wheel] = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, _FILES)
        for file in _FILES:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(place) / file).replace(folder / file)
    return folder


def requirements() -> list[str]:
    """Return the requirements of SGLang's wheel, such as `torch==2.14.1`."""
    metadata = email.message_from_string((sglang_sources() / _METADATA).read_text())
    return metadata.get_all("Requires-Dist", [])


@cache
def source(file: str) -> ast.Module:
    """Return one of SGLang's files, parsed."""
    return ast.parse((sglang_sources() / file).read_text())


@cache
def definition(name: str, file: str = _MESSAGES) -> type[BaseModel]:
    """Return a pydantic model of a class of SGLang with the same fields."""
    for node in source(file).body:
        match node:
            case ast.ClassDef() if node.name == name:
                config = ConfigDict(extra="forbid", strict=True)
                return create_model(name, __config__=config, **_fields(node, file))
            case ast.Assign(value=ast.Name(id=same)) if name in map(ast.unparse, node.targets):
                return definition(same, file)
    raise LookupError(f"SGLang {SGLANG} has no {name} in {file}")


def _fields(found: ast.ClassDef, file: str) -> dict[str, Any]:
    """Return the fields of a class and of its bases in the same file."""
    names = {base.id for base in found.bases if isinstance(base, ast.Name)}
    fields: dict[str, Any] = {}
    for node in source(file).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            fields |= _fields(node, file)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = (_type(node.annotation), _default(node.value))
    return fields


def _default(node: ast.expr | None) -> Any:
    """Return a literal default; None for a computed one."""
    if node is None:
        return ...
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


@cache
def server_fields() -> tuple[str, ...]:
    """Return the names of SGLang's server arguments, such as `model_path`."""
    [names] = [node.value for node in source(_OPTIONS).body if isinstance(node, ast.Assign)]
    return tuple(ast.literal_eval(names))


@cache
def server_options() -> frozenset[str]:
    """Return the options that SGLang's server has, such as `--model-path`."""
    return frozenset("--" + name.replace("_", "-") for name in server_fields())


@cache
def server_variables() -> frozenset[str]:
    """Return the variables that SGLang's server reads, such as `SGLANG_RETURN_ORIGINAL_LOGPROB`."""
    [variables] = cut(_VARIABLES, "Envs")
    assert isinstance(variables, ast.ClassDef)
    assigned = [node for node in variables.body if isinstance(node, ast.Assign)]
    return frozenset(ast.unparse(node.targets[0]) for node in assigned)


def _type(node: ast.expr) -> Any:
    """Return the type of an annotation; Any for SGLang's own types."""
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
        case "List" | "Set" | "Dict" as kind:
            return GenericAlias(dict if kind == "Dict" else list, types)
        case _:
            return Any


@cache
def own_functions() -> SimpleNamespace:
    """Return SGLang's functions that read tensors and join process groups.

    MultiprocessingSerializer, FlattenedTensorBucket, NetworkAddress, init_custom_process_group, and
    methods of WeightUpdater as functions.
    """
    nodes = [
        *cut(_BUCKET, "FlattenedTensorMetadata", "FlattenedTensorBucket"),
        *cut(COMMON, "MultiprocessingSerializer", "SafeUnpickler", "_safe_load_torch_storage"),
        *cut(COMMON, "init_custom_process_group"),
        *cut(_NETWORK, "NetworkAddress", "_is_ipv6", "_wrap"),
        *cut(
            _UPDATER,
            "init_weights_update_group",
            "destroy_weights_update_group",
            "receive_weights_from_distributed",
            "_receive_bucketed_weights_from_distributed",
        ),
    ]
    names = {
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
    return run(compiled(nodes), names)


def cut(file: str, *names: str) -> list[ast.stmt]:
    """Return the definitions with these names in a file, including methods."""
    found = [
        node
        for node in ast.walk(source(file))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name in names
    ]
    assert {node.name for node in found} == set(names), f"{file} has other names than {names}"
    return list(found)


def numbers(file: str) -> list[ast.stmt]:
    """Return the numeric constants of a file, such as `MAX_LEN = 2**30`."""
    return [
        node
        for node in source(file).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp)
    ]


def compiled(nodes: Iterable[ast.stmt]) -> CodeType:
    """Compile nodes to code."""
    # Annotations name classes that are not here.
    lazily = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module([*lazily, *nodes], type_ignores=[]))
    return compile(module, "sglang", "exec")


def run(code: CodeType, names: Mapping[str, Any]) -> SimpleNamespace:
    """Run code with these names, and return all names that it defines."""
    # Dataclasses look their module up by name.
    found = {"__name__": __name__, **names}
    exec(code, found)  # noqa: S102 - what runs in SGLang
    return SimpleNamespace(**found)


def read_tensors(payload: bytes) -> dict[str, torch.Tensor]:
    """Read a flattened bucket as an engine's rank does."""
    sglang = own_functions()
    data = sglang.MultiprocessingSerializer.deserialize(payload)
    bucket = sglang.FlattenedTensorBucket(
        flattened_tensor=data["flattened_tensor"], metadata=data["metadata"]
    )
    return dict(bucket.reconstruct_tensors())
