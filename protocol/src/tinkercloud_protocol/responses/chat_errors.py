"""Errors of the OpenAI- and Anthropic-compatible endpoints, in the shape of each of them.

https://platform.openai.com/docs/guides/error-codes
https://docs.anthropic.com/en/api/errors
"""

from typing import Any

import orjson

from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import ContextLengthExceeded, WireError

OPENAI = "/oai/"
ANTHROPIC = "/anthropic/"
PREFIXES = (OPENAI, ANTHROPIC)
"""Prefixes of the paths of these endpoints."""
CALLS = ("/completions", "/responses", "/embeddings", "/models", "/messages")
"""How the paths of calls of these clients end, also below a wrong base URL."""
BASE_URLS = (
    f"base_url must end in {routes.OPENAI} (OpenAI) or {routes.ANTHROPIC} (Anthropic, without /v1),"
    f" as in http://HOST:PORT{routes.OPENAI}"
)
"""What to do about a wrong base URL."""
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


def error_object(path: str, error: WireError) -> dict[str, Any]:
    """Return the body of an error as the clients of a path expect it.

    Clients that shorten a conversation which is too long look for the code
    `context_length_exceeded` or for the words of each API.

    Args:
        path: path of the request, which starts with one of `PREFIXES`.
        error: the error; the text of its message before a colon, if it is one word, names the
            parameter.
    """
    is_too_long = isinstance(error, ContextLengthExceeded)
    if path.startswith(ANTHROPIC):
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        message = error.message
        if isinstance(error, ContextLengthExceeded):
            message = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
        return {"type": "error", "error": {"type": kind, "message": message}}
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    name, colon, _ = error.message.partition(":")
    param = name if colon and " " not in name else None
    code = "context_length_exceeded" if is_too_long else _OPENAI_CODES.get(error.status)
    if error.status == 404:
        code = "model_not_found" if param == "model" else "not_found"
    kind = _OPENAI_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def error_bytes(path: str, error: WireError) -> bytes:
    """Return the body of an error in JSON; see `error_object`."""
    return orjson.dumps(error_object(path, error))


def error_event(path: str, error: WireError) -> bytes:
    """Return the error as the last event of a stream; see `error_object`."""
    event = b"event: error\n" if path.startswith(ANTHROPIC) else b""
    return event + b"data: " + error_bytes(path, error) + b"\n\n"
