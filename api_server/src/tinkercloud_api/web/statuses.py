"""What the response statuses of calls mean, for the OpenAPI document.

A route declares those that do not follow from the route table: `responses=statuses(...)`.
"""

from typing import Any

from tinkercloud_protocol.wire import future_responses, routes

_MEANINGS = {
    "206": "The range of bytes that the request asks for.",
    "302": "The archive is at the address in Location.",
    "304": "What the client has is current.",
    "400": "The request is invalid; repeating it does not help.",
    "401": "The key is missing, unknown or revoked.",
    "403": "The key is read-only or not an admin's, or its owner may only read the project.",
    "404": "The object does not exist, or belongs to another owner.",
    "408": "The result is not ready yet; poll again.",
    "410": "Permanently gone: a model with lost state, a discarded result, or an ended session.",
    "413": "The body is too large.",
    "416": "The range has no byte of the file.",
    "429": "Too many waiting requests, or unknown keys from this address; try again later.",
    "503": "The session head or the object store is unavailable; try again.",
}
IDEMPOTENCY_KEY = {
    "name": routes.IDEMPOTENCY_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 256},
    "description": "Requests with the same key and without a number are the same request.",
}
"""The parameter of calls that may have such a key."""
_ERROR = {future_responses.JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}


def statuses(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an operation that has these statuses."""
    return {code: _response(code) for code in codes}


def _response(code: str) -> dict[str, Any]:
    meaning = {"description": _MEANINGS[code]}
    return meaning if code < "400" else {**meaning, "content": _ERROR}
