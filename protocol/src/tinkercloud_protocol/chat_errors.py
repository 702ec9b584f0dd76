"""Errors of the OpenAI- and Anthropic-compatible endpoints, in the shape of each of them.

https://platform.openai.com/docs/guides/error-codes
https://docs.anthropic.com/en/api/errors
"""

from typing import Any

import orjson

from tinkercloud_protocol.errors import WireError

OPENAI = "/oai/"
ANTHROPIC = "/anthropic/"
PREFIXES = (OPENAI, ANTHROPIC)
"""Prefixes of the paths of these endpoints."""
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_OPENAI_CODES = {401: "invalid_api_key", 403: "permission_denied", 429: "rate_limit_exceeded"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
INTERNAL_ERROR = "internal error; see the server log for details"


def error_object(path: str, status: int, message: str) -> dict[str, Any]:
    """Return the body of an error as the clients of a path expect it.

    Args:
        path: path of the request, which starts with one of `PREFIXES`.
        status: the HTTP status.
        message: the message; its text before a colon, if it is one word, names the parameter.
    """
    if path.startswith(ANTHROPIC):
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    default = "server_error" if status >= 500 else "invalid_request_error"
    name, colon, _ = message.partition(":")
    param = name if colon and " " not in name else None
    code = _OPENAI_CODES.get(status)
    if status == 404:
        code = "model_not_found" if param == "model" else "not_found"
    kind = _OPENAI_TYPES.get(status, default)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_bytes(path: str, error: WireError) -> bytes:
    """Return the body of an error in JSON; see `error_object`."""
    return orjson.dumps(error_object(path, error.status, error.message))
