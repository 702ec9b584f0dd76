"""The OpenAPI document, `/openapi.json`: every supported call with its response statuses.

FastAPI describes its own routes, but knows neither the hot paths nor the statuses of our errors.
Nothing here is needed to serve a call.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from tinkercloud_api.access.mutations import is_mutation
from tinkercloud_api.web.openapi_chat import chat_operation
from tinkercloud_protocol.requests.sampling_requests import (
    CancelFutureRequest,
    NamedWeights,
    RetrieveFutureRequest,
    SampleRequest,
)
from tinkercloud_protocol.requests.training_requests import (
    AttachModelAnswer,
    AttachModelRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import future_responses, routes

_REFERENCE = "#/components/schemas/"


class SampleOfWeights(SampleRequest, NamedWeights):
    """POST asample and sample: `sampling_session_id`, or one of the fields that name weights."""


_TENSOR = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"type": "array", "items": {"type": "number"}},
        "dtype": {"enum": ["float32", "float64", "int32", "int64", "bool"]},
        "shape": {"type": "array", "items": {"type": "integer"}},
    },
}
_TOKENS = {"type": "array", "items": {"type": "integer"}}
_MODEL_INPUT = {
    "description": "One of the fields: all have the same meaning.",
    "type": "object",
    "properties": {
        "tokens": _TOKENS,
        "input_ids": _TOKENS,
        "chunks": {
            "type": "array",
            "items": {"type": "object", "properties": {"tokens": _TOKENS}},
        },
    },
}
_DATUM = {
    "type": "object",
    "required": ["model_input", "loss_fn_inputs"],
    "properties": {
        "model_input": _MODEL_INPUT,
        "loss_fn_inputs": {
            "type": "object",
            "additionalProperties": {"anyOf": [_TENSOR, {"type": "array"}]},
        },
    },
}
_BATCH = {
    "description": "The fields of a batch may also be within `forward_backward_input`.",
    "type": "object",
    "required": ["model_id", "data", "loss_fn"],
    "properties": {
        "model_id": {"type": "string"},
        "seq_id": {"type": "integer", "minimum": 1},
        "data": {"type": "array", "items": _DATUM},
        "loss_fn": {"type": "string"},
        "loss_fn_config": {"type": "object"},
    },
}
"""Schema of a batch in JSON, which `json_payloads` reads without a model."""
_STATUSES = {
    "206": "The range of bytes that the request asks for.",
    "302": "The archive is at the address in Location.",
    "304": "What the client has is current.",
    "400": "The request is invalid; repeating it does not help.",
    "401": "The key is missing, unknown or revoked.",
    "403": "The key is read-only, or its owner may only read the project.",
    "404": "The object does not exist, or belongs to another owner.",
    "408": "The result is not ready yet; poll again.",
    "410": "Permanently gone: a model with lost state, a discarded result, or an ended session.",
    "413": "The body is too large.",
    "416": "The range has no byte of the file.",
    "429": "Too many waiting requests, or unknown keys from this address; try again later.",
    "503": "The session head or the object store is unavailable; try again.",
}
_OF_EVERY_CALL = ("400", "401", "429", "503")
_WITHOUT_KEY = (
    ("/downloads/", ("206", "304", "400", "403", "404", "410", "416", "429", "503")),
    ("/traces/", ("404", "503")),
    ("/hf/", ("206", "304", "400", "404", "416")),
    ("/readyz", ("503",)),
    ("/healthz", ("503",)),
    ("/health", ("503",)),
    ("/api/v1/healthz", ("503",)),
    ("/livez", ()),
)
"""Starts of paths of calls without a key, and their statuses."""
_WITH_QUERY = {
    "/api/v1/training_runs",
    "/api/v1/billing/usage/checkpoints/current",
    "/api/v1/get_tokenizer",
}
"""Calls whose query may name an object."""
_FILES = {
    "/api/v1/get_tokenizer": ("206", "304", "416"),
    "/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id}/archive": ("302",),
}
"""Calls that return files, and the statuses that only these have."""
_WITHOUT_OBJECT = {"/api/v1/client/config", "/api/v1/client/dynamic_config", "/api/v1/telemetry"}
"""Calls with a body that refers to no object, so that they never return 404."""
_GONE = {
    "/api/v1/session_heartbeat",
    routes.ASAMPLE,
    routes.SAMPLE,
    routes.FORWARD,
    routes.ATTACH_MODEL,
    routes.CANCEL_FUTURE,
    routes.FORWARD,
    routes.FORWARD_BACKWARD,
    routes.LOAD_WEIGHTS,
    routes.OPTIM_STEP,
    routes.RETRIEVE_FUTURE,
    routes.SAVE_WEIGHTS,
    routes.SAVE_WEIGHTS_FOR_SAMPLER,
    routes.SAVE_WEIGHTS_EXTERNAL,
}
_IDEMPOTENT = {
    "/api/v1/create_model",
    routes.ASAMPLE,
    routes.SAMPLE,
    routes.FORWARD,
    routes.FORWARD_BACKWARD,
    routes.LOAD_WEIGHTS,
    routes.OPTIM_STEP,
    routes.SAVE_WEIGHTS,
    routes.SAVE_WEIGHTS_FOR_SAMPLER,
}
_IDEMPOTENCY_KEY = {
    "name": routes.IDEMPOTENCY_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 256},
    "description": "Requests with the same key and without a number are the same request.",
}
_JSON_BODIES: dict[str, type[BaseModel]] = {
    routes.OPTIM_STEP: OptimStepRequest,
    routes.SAVE_WEIGHTS: SaveWeightsRequest,
    routes.SAVE_WEIGHTS_FOR_SAMPLER: SaveWeightsForSamplerRequest,
    routes.SAVE_WEIGHTS_EXTERNAL: SaveWeightsExternalRequest,
    routes.LOAD_WEIGHTS: LoadWeightsRequest,
    routes.ATTACH_MODEL: AttachModelRequest,
    routes.ASAMPLE: SampleOfWeights,
    routes.SAMPLE: SampleOfWeights,
    routes.RETRIEVE_FUTURE: RetrieveFutureRequest,
    routes.CANCEL_FUTURE: CancelFutureRequest,
}


def describe(api: FastAPI, hot: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Return the OpenAPI document of an application.

    Args:
        api: the application.
        hot: method, path and summary of the calls that are served outside FastAPI.
    """
    if api.openapi_schema is None:
        document = get_openapi(title=api.title, version=api.version, routes=api.routes)
        schemas = document["components"]["schemas"]
        schemas["Error"] = _object(detail="string")
        schemas["Promise"] = _object(request_id="string", message="string")
        document["components"]["securitySchemes"] = {
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "bearer": {"type": "http", "scheme": "bearer"},
        }
        for method, path, summary in hot:
            operation = _operation(method, path, summary, schemas)
            document["paths"].setdefault(path, {})[method.lower()] = operation
        for path, method, operation in _operations(document):
            _add_error_responses(path, method, operation)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        api.openapi_schema = document
    return api.openapi_schema


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _add_error_responses(path: str, method: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    for start, unkeyed in _WITHOUT_KEY:
        if path.startswith(start):
            answers.update({status: _response(status) for status in unkeyed})
            return
    if not path.startswith(routes.PREFIX):
        return
    has_body = "requestBody" in operation
    has_object = "{" in path or path in _WITH_QUERY
    has_object = has_object or (has_body and path not in _WITHOUT_OBJECT)
    statuses = [
        *_OF_EVERY_CALL,
        *_FILES.get(path, ()),
        *(["403"] if is_mutation(method.upper(), path) else []),
        *(["404"] if has_object else []),
        *(["408"] if path == routes.RETRIEVE_FUTURE else []),
        *(["410"] if path in _GONE else []),
        *(["413"] if has_body else []),
    ]
    answers.update({status: _response(status) for status in statuses})
    operation["security"] = [{"key": []}, {"bearer": []}]
    if path in _IDEMPOTENT:
        operation["parameters"] = [*operation.get("parameters", []), _IDEMPOTENCY_KEY]
    operation.setdefault("operationId", f"{path.rsplit('/', 1)[-1]}_{method}")


def _response(status: str) -> dict[str, Any]:
    if status < "400":
        return {"description": _STATUSES[status]}
    content = {future_responses.JSON: {"schema": {"$ref": f"{_REFERENCE}Error"}}}
    return {"description": _STATUSES[status], "content": content}


def _operation(method: str, path: str, summary: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return an operation outside FastAPI, and add the schemas of its body to `schemas`."""
    if path.startswith(chat_errors.PREFIXES):
        return chat_operation(method.lower(), path, summary)
    if method == "PUT":
        return _upload_operation(summary)
    return _hot_operation(path, summary, schemas)


def _hot_operation(path: str, summary: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the operation of a hot path, and add the schemas of its body to `schemas`."""
    body = {future_responses.JSON: {"schema": _BATCH}}
    if path == routes.FORWARD_BACKWARD:
        body[future_responses.PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    if (model := _JSON_BODIES.get(path)) is not None:
        schema = model.model_json_schema(ref_template=_REFERENCE + "{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
        body = {future_responses.JSON: {"schema": {"$ref": _REFERENCE + model.__name__}}}
    is_result = path in {routes.RETRIEVE_FUTURE, routes.SAMPLE}
    content = {future_responses.JSON: {"schema": {"type": "object"}}}
    if path == routes.ATTACH_MODEL:
        answer = AttachModelAnswer.model_json_schema()
        content = {future_responses.JSON: {"schema": answer}}
    elif path == routes.RETRIEVE_FUTURE:
        content[future_responses.PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    elif path not in {routes.CANCEL_FUTURE, routes.SAMPLE}:
        content = {future_responses.JSON: {"schema": {"$ref": f"{_REFERENCE}Promise"}}}
    description = "The result, or the reason for the failure." if is_result else "Accepted."
    return {
        "tags": ["training and sampling"],
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": description, "content": content}},
    }


def _upload_operation(summary: str) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    name = {"name": "upload_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "tags": ["training runs"],
        "summary": summary,
        "parameters": [name],
        "requestBody": {"required": True, "content": {"application/octet-stream": binary}},
        "responses": {"200": {"description": "Received."}},
    }


def _object(**fields: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    return {"type": "object", "required": list(fields), "properties": properties}
