"""SGLang's API and its HTTP server, from its own source.

SGLang itself has no CPU build on PyPI. So its wheel is fetched, never installed nor imported, and
the models of its messages are made from the source in it: a field that SGLang does not know, or of
another type, is refused. Its functions are cut out of the source and run: those that read tensors
and join groups, and all of the process that answers over HTTP but for tokenizing and batching.
"""

import ast
import asyncio
import base64
import binascii
import contextlib
import dataclasses
import email
import io
import ipaddress
import logging
import os
import pickle
import socket
import subprocess
import tempfile
import time
import typing
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from types import CodeType, GenericAlias, SimpleNamespace
from typing import Any, Generic, Literal, Optional, TypeVar, Union

import torch
from pydantic import BaseModel, ConfigDict, create_model

from tinkercloud_testing.ranks.inference import cache_folder

Json = dict[str, Any]
SGLANG = "0.5.23"


class File(StrEnum):
    """The files of SGLang's wheel that define its API."""

    MESSAGES = "sglang/srt/managers/io_struct.py"
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
    SCHEDULER = "sglang/srt/managers/scheduler_components/weight_updater.py"
    FLUSHING = "sglang/srt/managers/scheduler_components/flush_wrapper.py"
    BUCKET = "sglang/srt/weight_sync/tensor_bucket.py"
    NETWORK = "sglang/srt/utils/network.py"
    UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
    OPTIONS = "sglang/srt/arg_groups/field_order.py"
    VARIABLES = "sglang/srt/environ.py"
    METADATA = f"sglang-{SGLANG}.dist-info/METADATA"


_PLAIN = {"int": int, "str": str, "float": float, "bool": bool}


def sglang_sources() -> Path:
    """Return a folder with the files of SGLang's wheel that define its API."""
    # Pods of engines set XDG_CACHE_HOME, so the image of the fake engine names its folder.
    named = os.environ.get("TINKERCLOUD_TEST_SGLANG_SOURCES")
    folder = Path(named) if named else cache_folder() / f"sglang-{SGLANG}"
    if all((folder / file).exists() for file in File):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # Other test processes may download the same files and be killed: write atomically.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", place]
        # The workspace's own environment has no pip.
        python = Path(__file__).parents[4] / ".uv" / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", *download, f"sglang=={SGLANG}"], check=True)
        [wheel] = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, File)
        for file in File:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(place) / file).replace(folder / file)
    return folder


def requirements() -> list[str]:
    """Return the requirements of SGLang's wheel, such as `torch==2.14.1`."""
    metadata = email.message_from_string((sglang_sources() / File.METADATA).read_text())
    return metadata.get_all("Requires-Dist", [])


@cache
def source(file: File) -> ast.Module:
    """Return one of SGLang's files, parsed."""
    return ast.parse((sglang_sources() / file).read_text())


@cache
def definition(name: str, file: File = File.MESSAGES) -> type[BaseModel]:
    """Return a pydantic model of a class of SGLang with the same fields."""
    for node in source(file).body:
        match node:
            case ast.ClassDef() if node.name == name:
                config = ConfigDict(extra="forbid", strict=True)
                return create_model(name, __config__=config, **_fields(node, file))
            case ast.Assign(value=ast.Name(id=same)) if name in map(ast.unparse, node.targets):
                return definition(same, file)
    raise LookupError(f"SGLang {SGLANG} has no {name} in {file}")


def _fields(found: ast.ClassDef, file: File) -> dict[str, Any]:
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
    [names] = [node.value for node in source(File.OPTIONS).body if isinstance(node, ast.Assign)]
    return tuple(ast.literal_eval(names))


@cache
def server_options() -> frozenset[str]:
    """Return the options that SGLang's server has, such as `--model-path`."""
    return frozenset("--" + name.replace("_", "-") for name in server_fields())


@cache
def server_variables() -> frozenset[str]:
    """Return the variables that SGLang's server reads, such as `SGLANG_RETURN_ORIGINAL_LOGPROB`."""
    [variables] = cut(File.VARIABLES, "Envs")
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
    return run(
        [
            *cut(File.BUCKET, "FlattenedTensorMetadata", "FlattenedTensorBucket"),
            *cut(File.COMMON, "MultiprocessingSerializer", "SafeUnpickler"),
            *cut(File.COMMON, "_safe_load_torch_storage", "init_custom_process_group"),
            *cut(File.NETWORK, "NetworkAddress", "_is_ipv6", "_wrap"),
            *cut(File.UPDATER, "init_weights_update_group", "destroy_weights_update_group"),
            *cut(File.UPDATER, "receive_weights_from_distributed"),
            *cut(File.UPDATER, "_receive_bucketed_weights_from_distributed"),
        ],
        io=io,
        ipaddress=ipaddress,
        pickle=pickle,
        socket=socket,
        torch=torch,
        torch_release=tuple(int(part) for part in torch.__version__.split(".")[:2]),
    )


def cut(file: File, *names: str) -> list[ast.stmt]:
    """Return the definitions with these names in a file, including methods."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found: list[ast.stmt] = [
        node for node in ast.walk(source(file)) if isinstance(node, kinds) and node.name in names
    ]
    assert {node.name for node in found if isinstance(node, kinds)} == set(names), (file, names)
    return found


def numbers(file: File) -> list[ast.stmt]:
    """Return the numeric constants of a file, such as `MAX_LEN = 2**30`."""
    return [
        node
        for node in source(file).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp)
    ]


def run(nodes: Iterable[ast.stmt], **names: Any) -> SimpleNamespace:
    """Run definitions with these names, and return all names that they define."""
    return _run(_compiled(nodes), names)


def _compiled(nodes: Iterable[ast.stmt]) -> CodeType:
    # Annotations name classes that are not here.
    lazily = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module([*lazily, *nodes], type_ignores=[]))
    return compile(module, "sglang", "exec")


def _run(code: CodeType, names: Mapping[str, Any]) -> SimpleNamespace:
    always = {
        # Dataclasses look their module up by name.
        "__name__": __name__,
        "List": list,
        "Tuple": tuple,
        "dataclass": dataclasses.dataclass,
        "logger": logging.getLogger(__name__),
    }
    found = {**always, **names}
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


_USED_MESSAGES = (
    *("GenerateReqInput", "BatchStrOutput", "BatchTokenIDOutput", "BatchEmbeddingOutput"),
    *("LoadLoRAAdapterReqInput", "LoadLoRAAdapterFromTensorsReqInput", "UnloadLoRAAdapterReqInput"),
    *("LoadLoRAAdapterReqOutput", "LoadLoRAAdapterFromTensorsReqOutput", "LoRAUpdateOutput"),
    *("UnloadLoRAAdapterReqOutput", "GetInternalStateReq", "FlushCacheReqInput"),
)
"""Classes of messages between its processes that the extracted functions use."""


@dataclass(frozen=True)
class Route:
    """The handler of one method and path."""

    handler: str
    asked: str | None
    """Name of the class of its body."""
    query: frozenset[str]
    """Names of the numbers that may follow its path."""


@dataclass
class Reply:
    """A response; SGLang calls this ORJSONResponse."""

    content: Any = None
    status_code: int = 200


@cache
def routes() -> Mapping[tuple[str, str], Route]:
    """Return SGLang's routes by method and path."""
    found: dict[tuple[str, str], Route] = {}
    for handler in source(File.ROUTES).body:
        if not isinstance(handler, ast.AsyncFunctionDef):
            continue
        asked = {each.arg: each.annotation for each in handler.args.args}
        numbers = {name for name, kind in asked.items() if _class_name(kind) == "float"}
        route = Route(handler.name, _class_name(asked.get("obj")), frozenset(numbers))
        for mark in handler.decorator_list:
            found |= dict.fromkeys(_answered(mark), route)
    return found


def _answered(mark: ast.expr) -> list[tuple[str, str]]:
    """Return the methods and paths of a route decorator; empty for other decorators."""
    match mark:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="app"), attr=kind), args=[ast.Constant(value=path)]
        ):
            options = {option.arg: option.value for option in mark.keywords}
            methods = [kind.upper()]
            if kind == "api_route":
                methods = ast.literal_eval(options["methods"])
            return [(method, str(path)) for method in methods]
        case _:
            return []


def _class_name(annotation: ast.expr | None) -> str | None:
    """Return the class of a body from an annotation."""
    while isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        annotation = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
    return annotation.id if isinstance(annotation, ast.Name) else None


@cache
def asked_of_processes() -> Mapping[str, str]:
    """Return the manager's calls to other processes, with the classes of the results."""
    [specs] = [
        node.value
        for node in source(File.CONTROL).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_COMMUNICATOR_SPECS"
    ]
    assert isinstance(specs, ast.List)
    pairs = [spec.elts[:2] for spec in specs.elts if isinstance(spec, ast.Tuple)]
    return {ast.literal_eval(name): ast.unparse(answer) for name, answer in pairs}


def parts() -> SimpleNamespace:
    """Return the parts of the HTTP process for one server: `_global_state` is empty yet."""
    return _run(_code(), {**_surroundings(), "_global_state": SimpleNamespace()})


@cache
def _code() -> CodeType:
    """Return the code of the routes and of their implementation in the same process."""
    handlers = [copy(node) for node in cut(File.ROUTES, *{r.handler for r in routes().values()})]
    for handler in handlers:
        assert isinstance(handler, ast.FunctionDef | ast.AsyncFunctionDef)
        handler.decorator_list = []
        # Of a framework that is not here; all that is asked for is given.
        handler.args = copy(handler.args)
        handler.args.defaults = []
    whole = ast.parse("class TokenizerManager: ...").body[0]
    assert isinstance(whole, ast.ClassDef)
    mixin = cut(File.CONTROL, "TokenizerControlMixin")
    for each in (*mixin, *cut(File.MANAGER, "TokenizerManager")):
        assert isinstance(each, ast.ClassDef)
        whole.body += [node for node in each.body if _stands_alone(node)]
    return _compiled(
        [
            *handlers,
            whole,
            *cut(File.ROUTES, "serve_generate_request", "_create_error_response"),
            *cut(File.CONTROL, "_merge_lora_update_results", "_lora_load_needs_cleanup"),
            *cut(File.COMMUNICATOR, "FanOutCommunicator"),
            *cut(File.MANAGER, "ReqState"),
            *cut(File.REGISTRY, "LoRARegistry"),
            *cut(File.LOCKS, "RWLock", "_ReaderLock", "_WriterLock"),
            *cut(
                File.COMMON, "ConcurrentCounter", "build_server_info", "_looks_like_pickle_payload"
            ),
            *cut(File.COMMON, "normalize_serialized_named_tensor_payload"),
            *cut(File.COMMON, "normalize_serialized_named_tensor_payloads"),
        ]
    )


def _stands_alone(node: ast.stmt) -> bool:
    """Return whether a method can be defined without the rest of its file."""
    return (
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name != "__init__"
        and all(isinstance(default, ast.Constant) for default in node.args.defaults)
        and all(ast.unparse(mark) == "staticmethod" for mark in node.decorator_list)
    )


def _surroundings() -> Json:
    """Return replacements for names that the extracted functions use."""
    settings: dict[str, Json] = {
        "get_lora": {"enable_lora": True, "max_loaded_loras": None},
        "get_parallel": {"dp_size": 1, "num_dp_ranks": 1},
        "get_serving": {
            "batch_notify_size": 1,
            "preferred_sampling_params": None,
            "tokenizer_path": "",
        },
        "get_spec": {"speculative_algorithm": None},
    }
    off = SimpleNamespace(get=lambda: False)
    return {
        **{name: definition(name) for name in _USED_MESSAGES},
        **{name: partial(SimpleNamespace, **known) for name, known in settings.items()},
        "Generic": Generic,
        "HEALTH_CHECK_RID_PREFIX": "HEALTH_CHECK",
        "HTTPStatus": HTTPStatus,
        "LoRARef": _lora_ref,
        "ORJSONResponse": Reply,
        "OrderedDict": OrderedDict,
        "Response": _response,
        "T": TypeVar("T"),
        "__version__": SGLANG,
        "asyncio": asyncio,
        "binascii": binascii,
        "dataclasses": dataclasses,
        "describe_kv_events_publisher": lambda _: None,
        "envs": SimpleNamespace(SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=off),
        "generate_contract_error": _contract().generate_contract_error,
        "msgspec_to_builtins": _plain,
        "nullcontext": contextlib.nullcontext,
        "orjson_response": Reply,
        "pickle": pickle,
        "pybase64": base64,
        "redact_watermark_secrets": lambda known: known,
        "time": time,
        "try_build_beam_search_out_dict": lambda *_: None,
        "unwrap_from_pickle": lambda known: known,
    }


def _response(content: str, status_code: int) -> Reply:
    return Reply(content, status_code)


def _lora_ref(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_id=uuid.uuid4().hex, **fields)


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


@cache
def _contract() -> SimpleNamespace:
    """Return SGLang's validation of `/generate` requests."""

    class Struct:
        def __init_subclass__(cls, **_: bool) -> None:
            pass

        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

    imports = ast.Import | ast.ImportFrom
    types = [node for node in source(File.API_TYPES).body if not isinstance(node, imports)]
    names = vars(typing) | {"msgspec": SimpleNamespace(Struct=Struct)}
    return _run(_compiled([*types, *cut(File.CONTRACT, "generate_contract_error")]), names)


@cache
def finish_reasons() -> SimpleNamespace:
    """Return SGLang's reasons why a sequence ends."""
    matched = ("FINISH_MATCHED_TOKEN", "FINISH_MATCHED_STR", "FINISHED_MATCHED_REGEX")
    return run(cut(File.BATCH, "BaseFinishReason", *matched, "FINISH_LENGTH"))


@cache
def flushing() -> SimpleNamespace:
    """Return SGLang's functions that flush the cache, on request and after a weight update."""
    nodes = [
        *cut(File.FLUSHING, "SchedulerFlushWrapper"),
        *cut(File.SCHEDULER, "flush_cache_after_weight_update"),
    ]
    return run(
        nodes, FlushCacheReqOutput=definition("FlushCacheReqOutput"), logging=logging, time=time
    )
