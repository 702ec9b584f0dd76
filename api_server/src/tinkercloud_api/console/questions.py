"""One question to a model: what clients of the OpenAI-compatible endpoints send and receive."""

from collections.abc import Mapping
from typing import Any, Literal

from tinkercloud_protocol.wire import routes

Kind = Literal["chat", "text"]
"""How a question is sent: as a message of a chat, or as a text to continue."""
PATHS: Mapping[Kind, str] = {
    "chat": routes.OPENAI_CHAT,
    "text": routes.OPENAI_COMPLETIONS,
}
"""Where a question of each kind is sent."""


def body_of(kind: Kind, prompt: str, **others: object) -> dict[str, object]:
    """Return the body of the request for an answer with the logprobs of its tokens.

    Args:
        kind: how the prompt is sent.
        prompt: the question.
        others: further fields, such as `model`.
    """
    if kind == "chat":
        return {"messages": [{"role": "user", "content": prompt}], "logprobs": True, **others}
    return {"prompt": prompt, "logprobs": 0, **others}


def answer_of(kind: Kind, content: Mapping[str, Any]) -> tuple[str, list[tuple[str, float]]]:
    """Return the text of an answer, and its tokens with their logprobs.

    Args:
        kind: how the question was sent.
        content: the JSON of the response.
    """
    choice = content["choices"][0]
    logprobs = choice["logprobs"] or {}
    if kind == "chat":
        entries = logprobs.get("content") or []
        return choice["message"]["content"] or "", [(e["token"], e["logprob"]) for e in entries]
    pairs = zip(logprobs.get("tokens", []), logprobs.get("token_logprobs", []), strict=True)
    return choice["text"], list(pairs)
