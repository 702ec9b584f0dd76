"""Parts of SGLang's server, extracted from its source: its routes and their implementation.

They are what runs in the process that answers over HTTP, but for tokenizing and batching.
"""

import ast
import asyncio
import base64
import binascii
import contextlib
import dataclasses
import logging
import pickle
import time
import typing
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from types import CodeType, SimpleNamespace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from tinkercloud_testing.sglang_definitions import (
    API_TYPES,
    BATCH,
    COMMON,
    COMMUNICATOR,
    CONTRACT,
    CONTROL,
    FLUSHING,
    LOCKS,
    MANAGER,
    REGISTRY,
    ROUTES,
    SGLANG,
    WEIGHT_UPDATER,
    compiled,
    cut,
    definition,
    run,
    source,
)

Json = dict[str, Any]
_MESSAGES = (
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
    for handler in source(ROUTES).body:
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
        for node in source(CONTROL).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_COMMUNICATOR_SPECS"
    ]
    assert isinstance(specs, ast.List)
    pairs = [spec.elts[:2] for spec in specs.elts if isinstance(spec, ast.Tuple)]
    return {ast.literal_eval(name): ast.unparse(answer) for name, answer in pairs}


def parts() -> SimpleNamespace:
    """Return the parts by name, for one server: `_global_state` is empty yet."""
    return run(_code(), {**_surroundings(), "_global_state": SimpleNamespace()})


@cache
def _code() -> CodeType:
    """Return the code of the routes and of their implementation in the same process."""
    handlers = [copy(node) for node in cut(ROUTES, *{r.handler for r in routes().values()})]
    for handler in handlers:
        assert isinstance(handler, ast.FunctionDef | ast.AsyncFunctionDef)
        handler.decorator_list = []
        # Of a framework that is not here; all that is asked for is given.
        handler.args = copy(handler.args)
        handler.args.defaults = []
    [manager], [control] = cut(MANAGER, "TokenizerManager"), cut(CONTROL, "TokenizerControlMixin")
    whole = ast.parse("class TokenizerManager: ...").body[0]
    assert isinstance(whole, ast.ClassDef)
    for each in (control, manager):
        assert isinstance(each, ast.ClassDef)
        whole.body += [node for node in each.body if _stands_alone(node)]
    return compiled(
        [
            *handlers,
            whole,
            *cut(ROUTES, "serve_generate_request", "_create_error_response"),
            *cut(CONTROL, "_merge_lora_update_results", "_lora_load_needs_cleanup"),
            *cut(COMMUNICATOR, "FanOutCommunicator"),
            *cut(MANAGER, "ReqState"),
            *cut(REGISTRY, "LoRARegistry"),
            *cut(LOCKS, "RWLock", "_ReaderLock", "_WriterLock"),
            *cut(COMMON, "ConcurrentCounter", "build_server_info", "_looks_like_pickle_payload"),
            *cut(COMMON, "normalize_serialized_named_tensor_payload"),
            *cut(COMMON, "normalize_serialized_named_tensor_payloads"),
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
        **{name: definition(name) for name in _MESSAGES},
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
        "logger": logging.getLogger(__name__),
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
    types = [node for node in source(API_TYPES).body if not isinstance(node, imports)]
    names = vars(typing) | {"msgspec": SimpleNamespace(Struct=Struct)}
    return run(compiled([*types, *cut(CONTRACT, "generate_contract_error")]), names)


@cache
def finish_reasons() -> SimpleNamespace:
    """Return SGLang's reasons why a sequence ends."""
    matched = ("FINISH_MATCHED_TOKEN", "FINISH_MATCHED_STR", "FINISHED_MATCHED_REGEX")
    return run(compiled(cut(BATCH, "BaseFinishReason", *matched, "FINISH_LENGTH")), {})


@cache
def flushing() -> SimpleNamespace:
    """Return SGLang's functions that flush the cache, on request and after a weight update."""
    nodes = [
        *cut(FLUSHING, "SchedulerFlushWrapper"),
        *cut(WEIGHT_UPDATER, "flush_cache_after_weight_update"),
    ]
    answer = "FlushCacheReqOutput"
    return run(compiled(nodes), {answer: definition(answer), "logging": logging, "time": time})
