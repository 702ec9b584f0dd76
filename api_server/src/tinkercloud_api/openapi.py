"""The OpenAPI document, `/openapi.json`: every supported call with its response statuses.

FastAPI describes its own routes, but knows neither the hot paths nor the statuses of our errors.
Nothing here is needed to serve a call.
"""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from tinkercloud_protocol import futures, routes
from tinkercloud_protocol.sampling import CancelFutureRequest, RetrieveFutureRequest, SampleRequest
from tinkercloud_protocol.training import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

_REFERENCE = "#/components/schemas/"
_STATUSES = {
    "400": "The request is invalid; repeating it does not help.",
    "401": "The key is missing, unknown or revoked.",
    "404": "The object does not exist, or belongs to another owner.",
    "408": "The result is not ready yet; poll again.",
    "410": "Permanently gone: a model with lost state, a discarded result, or an ended session.",
    "413": "The body is too large.",
    "429": "Too many waiting requests, or unknown keys from this address; try again later.",
    "503": "The session head or the object store is unavailable; try again.",
}
_OF_EVERY_CALL = ("400", "401", "429", "503")
_WITHOUT_OBJECT = {"/api/v1/client/config", "/api/v1/client/dynamic_config", "/api/v1/telemetry"}
"""Calls with a body that refers to no object, so that they never return 404."""
_GONE = {
    "/api/v1/session_heartbeat",
    routes.ASAMPLE,
    routes.CANCEL_FUTURE,
    routes.FORWARD_BACKWARD,
    routes.LOAD_WEIGHTS,
    routes.OPTIM_STEP,
    routes.RETRIEVE_FUTURE,
    routes.SAVE_WEIGHTS,
    routes.SAVE_WEIGHTS_FOR_SAMPLER,
    routes.SAVE_WEIGHTS_EXTERNAL,
}
_JSON_BODIES: dict[str, type[BaseModel]] = {
    routes.OPTIM_STEP: OptimStepRequest,
    routes.SAVE_WEIGHTS: SaveWeightsRequest,
    routes.SAVE_WEIGHTS_FOR_SAMPLER: SaveWeightsForSamplerRequest,
    routes.SAVE_WEIGHTS_EXTERNAL: SaveWeightsExternalRequest,
    routes.LOAD_WEIGHTS: LoadWeightsRequest,
    routes.ASAMPLE: SampleRequest,
    routes.RETRIEVE_FUTURE: RetrieveFutureRequest,
    routes.CANCEL_FUTURE: CancelFutureRequest,
}
_UPLOAD = "/api/v1/checkpoints/uploads/{upload_id}/adapter_model.safetensors"
"""Served outside FastAPI, like the hot paths."""
_SUMMARIES = {
    routes.FORWARD_BACKWARD: "Compute losses and accumulate gradients",
    routes.OPTIM_STEP: "Apply the accumulated gradients",
    routes.SAVE_WEIGHTS: "Save a training checkpoint",
    routes.SAVE_WEIGHTS_FOR_SAMPLER: "Save weights for sampling",
    routes.SAVE_WEIGHTS_EXTERNAL: "Save weights as files for other programs",
    routes.LOAD_WEIGHTS: "Load a checkpoint into a model or as a new model",
    routes.ASAMPLE: "Sample",
    routes.RETRIEVE_FUTURE: "Wait for the result of a request",
    routes.CANCEL_FUTURE: "Cancel a sampling request",
}


def describe(api: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application, including the hot paths."""
    if api.openapi_schema is None:
        document = get_openapi(title=api.title, version=api.version, routes=api.routes)
        schemas = document["components"]["schemas"]
        schemas["Error"] = _object(detail="string")
        schemas["Promise"] = _object(request_id="string")
        document["components"]["securitySchemes"] = {
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}
        }
        for path in _SUMMARIES:
            document["paths"][path] = {"post": _hot_operation(path, schemas)}
        document["paths"][_UPLOAD] = {"put": _upload_operation()}
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
    if not path.startswith(routes.PREFIX) or path == "/api/v1/healthz":
        return
    has_body = "requestBody" in operation
    has_object = "{" in path or (has_body and path not in _WITHOUT_OBJECT)
    statuses = [
        *_OF_EVERY_CALL,
        *(["404"] if has_object else []),
        *(["408"] if path == routes.RETRIEVE_FUTURE else []),
        *(["410"] if path in _GONE else []),
        *(["413"] if has_body else []),
    ]
    content = {futures.JSON: {"schema": {"$ref": f"{_REFERENCE}Error"}}}
    for status in statuses:
        answers[status] = {"description": _STATUSES[status], "content": content}
    operation["security"] = [{"key": []}]
    parameters = operation.get("parameters", [])
    operation["parameters"] = [each for each in parameters if each["name"] != "x-api-key"]
    operation.setdefault("operationId", f"{path.rsplit('/', 1)[-1]}_{method}")


def _hot_operation(path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the operation of a hot path, and add the schemas of its body to `schemas`."""
    body = {futures.PROTOBUF: {"schema": {"type": "string", "format": "binary"}}}
    if (model := _JSON_BODIES.get(path)) is not None:
        schema = model.model_json_schema(ref_template=_REFERENCE + "{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
        body = {futures.JSON: {"schema": {"$ref": _REFERENCE + model.__name__}}}
    is_result = path == routes.RETRIEVE_FUTURE
    content = {futures.JSON: {"schema": {"type": "object"}}}
    if is_result:
        content[futures.PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    elif path != routes.CANCEL_FUTURE:
        content = {futures.JSON: {"schema": {"$ref": f"{_REFERENCE}Promise"}}}
    description = "The result, or the reason for the failure." if is_result else "Accepted."
    return {
        "tags": ["training and sampling"],
        "summary": _SUMMARIES[path],
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": description, "content": content}},
    }


def _upload_operation() -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    name = {"name": "upload_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "tags": ["training runs"],
        "summary": "Upload the weights of an adapter",
        "parameters": [name],
        "requestBody": {"required": True, "content": {"application/octet-stream": binary}},
        "responses": {"200": {"description": "Received."}},
    }


def _object(**fields: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    return {"type": "object", "required": list(fields), "properties": properties}
