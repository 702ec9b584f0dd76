"""The OpenAPI document, `/openapi.json`: every supported call with its response statuses.

FastAPI describes its own routes, but knows neither the hot paths nor the statuses that follow from
the route table. Nothing here is needed to serve a call.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tinkercloud_api.serve.hot_routes import HotRoute
from tinkercloud_api.serve.route_table import Authentication, Row
from tinkercloud_api.web.statuses import IDEMPOTENCY_KEY, statuses
from tinkercloud_protocol.requests.training_requests import AttachModelAnswer
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import future_responses, routes

_REFERENCE = "#/components/schemas/"


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
_NO_BRACES = str.maketrans("", "", "{}")
_CHAT_STATUSES = {
    "400": "A field is invalid or not supported; the message names it.",
    "401": "The key is missing, unknown or revoked.",
    "404": "The model does not exist, or belongs to another owner.",
    "413": "The body is too large.",
    "429": "Too many waiting requests; try again later.",
    "503": "The session head is unavailable; try again.",
}
_OF_EVERY_CALL = ("400", "401", "429", "503")


def describe(api: FastAPI, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the OpenAPI document of an application.

    Args:
        api: the application.
        rows: the route table.
    """
    if api.openapi_schema is None:
        document = get_openapi(title=api.title, version=api.version, routes=api.routes)
        paths, schemas = document["paths"], document["components"]["schemas"]
        schemas["Error"] = _object(detail="string")
        schemas["Promise"] = _object(request_id="string", message="string")
        document["components"]["securitySchemes"] = {
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "bearer": {"type": "http", "scheme": "bearer"},
        }
        for row in rows:
            if row.hot is not None and row.hot.summary is not None:
                operation = _operation(row.hot, row.hot.summary, schemas)
                paths.setdefault(row.path, {})[row.method.lower()] = operation
            if (found := paths.get(row.described_path, {}).get(row.method.lower())) is not None:
                _complete(row, found)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        api.openapi_schema = document
    return api.openapi_schema


def _complete(row: Row, operation: dict[str, Any]) -> None:
    """Add what follows from the table to an operation."""
    answers = operation["responses"]
    answers.pop("422", None)
    if row.authentication is not Authentication.KEY or not row.path.startswith(routes.PREFIX):
        return
    has_body = "requestBody" in operation
    answers |= statuses(
        *_OF_EVERY_CALL,
        *(["403"] if row.effect.is_mutation or row.effect.needs_admin else []),
        *(["404"] if row.names_object else []),
        *(["413"] if has_body else []),
    )
    operation["security"] = [{"key": []}, {"bearer": []}]
    operation.setdefault("operationId", f"{row.path.rsplit('/', 1)[-1]}_{row.method.lower()}")


def _operation(route: HotRoute, summary: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return an operation outside FastAPI, and add the schemas of its body to `schemas`."""
    if route.path.startswith(chat_errors.PREFIXES):
        return _chat_operation(route.method.lower(), route.path, summary)
    if route.method == "PUT":
        return _upload_operation(summary)
    return _hot_operation(route, summary, schemas)


def _hot_operation(route: HotRoute, summary: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the operation of a hot path, and add the schemas of its body to `schemas`."""
    path, body = route.path, {future_responses.JSON: {"schema": _BATCH}}
    if path == routes.FORWARD_BACKWARD:
        body[future_responses.PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    if route.body is not None:
        schema = route.body.model_json_schema(ref_template=_REFERENCE + "{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[route.body.__name__] = schema
        body = {future_responses.JSON: {"schema": {"$ref": _REFERENCE + route.body.__name__}}}
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
    operation: dict[str, Any] = {
        "tags": ["training and sampling"],
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": description, "content": content}},
    }
    # They are forwarded to the head of a model, which may be gone.
    operation["responses"] |= statuses("410")
    if path == routes.RETRIEVE_FUTURE:
        operation["responses"] |= statuses("408")
    if route.takes_key:
        operation["parameters"] = [IDEMPOTENCY_KEY]
    return operation


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


def _chat_operation(method: str, path: str, summary: str) -> dict[str, Any]:
    """Return an operation of a chat client, whose own documentation describes the bodies.

    Args:
        method: in lower case.
        path: with fields in braces.
        summary: of the operation.
    """
    content = {future_responses.JSON: {"schema": {"type": "object"}}}
    operation: dict[str, Any] = {
        "tags": ["anthropic" if path.startswith(chat_errors.ANTHROPIC) else "openai"],
        "summary": summary,
        "operationId": f"{method}_{path.strip('/')}".replace("/", "_").translate(_NO_BRACES),
        "responses": {"200": {"description": "The answer.", "content": content}},
        "security": [{"key": []}, {"bearer": []}],
    }
    for status, description in _CHAT_STATUSES.items():
        operation["responses"][status] = {"description": description, "content": content}
    if method == "post":
        operation["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _object(**fields: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    return {"type": "object", "required": list(fields), "properties": properties}
