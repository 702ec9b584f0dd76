"""The operations of the OpenAI- and Anthropic-compatible endpoints in the OpenAPI document.

Their bodies are those that the clients' own documentation describes; `docs/use/openai.md` lists the
fields that this server supports.
"""

from typing import Any

from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import future_responses

_STATUSES = {
    "400": "A field is invalid or not supported; the message names it.",
    "401": "The key is missing, unknown or revoked.",
    "404": "The model does not exist, or belongs to another owner.",
    "413": "The body is too large.",
    "429": "Too many waiting requests; try again later.",
    "503": "The session head is unavailable; try again.",
}


def chat_operation(method: str, path: str, summary: str) -> dict[str, Any]:
    """Return an operation; `method` is in lower case, and `path` has fields in braces."""
    content = {future_responses.JSON: {"schema": {"type": "object"}}}
    operation: dict[str, Any] = {
        "tags": ["anthropic" if path.startswith(chat_errors.ANTHROPIC) else "openai"],
        "summary": summary,
        "operationId": f"{method}_{path.strip('/')}".replace("/", "_").translate(_NO_BRACES),
        "responses": {"200": {"description": "The answer.", "content": content}},
        "security": [{"key": []}, {"bearer": []}],
    }
    for status, description in _STATUSES.items():
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


_NO_BRACES = str.maketrans("", "", "{}")
