"""Requests and answers of Anthropic's Messages API.

https://docs.anthropic.com/en/api/messages
https://docs.anthropic.com/en/api/messages-streaming
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from tinkercloud_protocol.requests.sampling_requests import SamplingParams
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import Items, Name, WireModel
from tinkercloud_worker.chat.answer_parts import Part, Thought, ToolCall
from tinkercloud_worker.chat.conversation import (
    MAX_MESSAGES,
    Asked,
    Choice,
    Counts,
    Effort,
    read_fields,
    read_object,
)
from tinkercloud_worker.chat.rules.answer_rules import Function, ToolChoice, rule_of
from tinkercloud_worker.chat.text import ChatText

IGNORED = frozenset(
    {
        "cache_control",
        "inference_geo",
        "metadata",
        "service_tier",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields that do not change the answer of this server."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    "speed": ("standard",),
    # Nothing is ever cleared from a conversation.
    "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},),
}
_Blocks = str | Items[dict[str, Any]]


class AnthropicMessage(WireModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: _Blocks


class AnthropicTool(WireModel):
    """A tool of the client."""

    type: Literal["custom"] | None = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class _ToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Name | None = None
    """The tool of type "tool"."""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> "_ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: required with type tool, and only then")
        return self


class _OutputFormat(WireModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


def _refused(value: object) -> object:
    del value
    raise ValueError("this server does not support it; leave it out")


class _Thinking(WireModel):
    """Whether reasoning is apart from the text. How much there is, the model decides."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_refused)]]

    type: Literal["adaptive", "disabled"]
    display: Literal["summarized"] | None = None
    """The whole reasoning is returned, in a block of type `thinking`."""


class _OutputConfig(WireModel):
    """The form of the text of an answer. Other settings of the output are refused."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_refused)]]

    effort: Effort | None = None
    """As OpenAI's `reasoning_effort`. Anthropic's agents send it to every model, so that it has no
    effect where the chat template has no variable for it."""
    format: _OutputFormat | None = None


class CountTokensRequest(WireModel):
    """POST messages/count_tokens."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    messages: Annotated[Items[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: _Blocks | None = None
    tools: Annotated[Items[AnthropicTool], Field(max_length=1024)] = []  # noqa: RUF012 - pydantic copies it
    tool_choice: _ToolChoice = _ToolChoice()
    output_config: _OutputConfig = _OutputConfig()
    thinking: _Thinking = _Thinking(type="disabled")

    @property
    def used_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as chat templates receive them."""
        if self.tool_choice.type == "none":
            return []
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools
        ]

    def tokens(self, text: ChatText) -> list[int]:
        """Return the conversation as tokens, up to where the model continues.

        Raises:
            InvalidRequest: it has content that is not supported.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for index, message in enumerate(self.messages):
            messages += _for_template(message, f"messages.{index}.content")
        continues = self.messages[-1].role == "assistant" and "tool_calls" not in messages[-1]
        effort = self.output_config.effort
        says_effort = effort is not None and text.uses("reasoning_effort")
        options = {"reasoning_effort": effort} if says_effort else {}
        return text.render(messages, self.used_tools, options, continues_last=continues)


class MessagesRequest(CountTokensRequest):
    """POST messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Items[str] = []  # noqa: RUF012 - pydantic copies it
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    def ask(self, text: ChatText) -> Asked:
        """Return what is asked, with the conversation as tokens.

        Raises:
            InvalidRequest: the conversation has content that is not supported.
        """
        form = self.output_config.format
        functions = [
            Function(
                tool.name,
                tool.input_schema,
                f"tools.{index}.input_schema",
                is_strict=bool(tool.strict),
            )
            for index, tool in enumerate(self.tools)
        ]
        schema = None if form is None else form.schema_
        choice = self._choice
        rule = rule_of(functions, choice, schema, "output_config")
        return Asked(
            model=self.model,
            prompts=[self.tokens(text)],
            params=SamplingParams(
                max_tokens=self.max_tokens,
                stop=list(self.stop_sequences) or None,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
            ),
            stops=tuple(self.stop_sequences),
            streams=self.stream,
            offered=() if choice.kind == "none" else functions,
            separates_reasoning=self.thinking.type == "adaptive",
            rule=rule,
        )

    @property
    def _choice(self) -> ToolChoice:
        choice = self.tool_choice
        kind = {"any": "required", "tool": "named"}.get(choice.type, choice.type)
        return ToolChoice(kind, choice.name, choice.disable_parallel_tool_use)


def _unsupported(where: str, kind: object, accepted: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: this server does not support blocks of type {str(kind)[:40]!r} here; send"
        f" {accepted}"
    )


def _text(content: _Blocks, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise _unsupported(where, block.get("type"), "blocks of type 'text' with a text")
        texts.append(block["text"])
    return "".join(texts)


def _for_template(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """Return a message as chat templates receive it: each tool result is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[dict[str, Any]] = []
    calls, results = [], []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_use" and message.role == "assistant":
            calls.append(_call_of(block, where))
        elif kind == "tool_result" and message.role == "user":
            content = block.get("content") or ""
            if not isinstance(content, str | list):
                raise InvalidRequest(f"{where}: content of a tool_result must be text or blocks")
            if isinstance(content, list) and not all(isinstance(each, dict) for each in content):
                raise InvalidRequest(f"{where}: content of a tool_result must be text or blocks")
            text = _text(content, f"{where}.tool_result")
            identity = str(block.get("tool_use_id", ""))
            results.append({"role": "tool", "content": text, "tool_call_id": identity})
        elif kind not in {"thinking", "redacted_thinking"}:
            texts.append(block)
    own: dict[str, Any] = {"role": message.role, "content": _text(texts, where)}
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or calls or not results else results


def _call_of(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}: a tool_use needs a name and an input, which is an object")
    function = {"name": name, "arguments": arguments}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def read_messages(body: bytes) -> MessagesRequest:
    """Read a request for a message.

    Raises:
        InvalidRequest: a field is invalid or not supported.
    """
    return read_fields(MessagesRequest, read_object(body), ignored=IGNORED, neutral=_NEUTRAL)


def read_count_tokens(body: bytes) -> CountTokensRequest:
    """Read a request to count tokens.

    Raises:
        InvalidRequest: a field is invalid or not supported.
    """
    return read_fields(CountTokensRequest, read_object(body), ignored=IGNORED, neutral=_NEUTRAL)


def _event(kind: str, **fields: object) -> bytes:
    content = orjson.dumps({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n"


class MessageAnswer:
    """The answer of messages: one choice, in blocks of text and of tool use."""

    def __init__(self, asked: Asked) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = asked.model
        self._num_prompt_tokens = len(asked.prompts[0])
        self._blocks: list[dict[str, Any]] = []
        self._open: str | None = None
        """The type of the block that the stream is within: "text" or "thinking"; None for none."""
        self._sent = 0

    def keep(self, index: int, parts: Sequence[Part]) -> None:
        """Keep parts of the message for the whole answer."""
        del index
        for part in parts:
            if isinstance(part, ToolCall):
                self._blocks.append(_tool_use(part))
                continue
            kind = _kind_of(part)
            if not self._blocks or self._blocks[-1]["type"] != kind:
                self._blocks.append(_empty(kind))
            self._blocks[-1][kind] += part

    def keep_prompt(self, index: int, text: str, scored: Sequence[object]) -> None:
        """Do nothing: messages do not repeat their prompt."""

    def begin(self, num_choices: int) -> bytes:
        """Return the beginning of the stream."""
        del num_choices
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage))

    def add(self, index: int, parts: Sequence[Part], tokens: Sequence[object]) -> bytes:
        """Return events with the newest parts of the message."""
        del index, tokens
        return b"".join(event for part in parts for event in self._events(part))

    def _events(self, part: Part) -> list[bytes]:
        events = []
        if isinstance(part, str):
            kind = _kind_of(part)
            if self._open != kind:
                events += [self._stop(), self._start(_empty(kind))]
                self._open = kind
            delta = {"type": f"{kind}_delta", kind: str(part)}
            return [*events, _event("content_block_delta", index=self._sent, delta=delta)]
        delta = {"type": "input_json_delta", "partial_json": part.arguments_json}
        events.append(self._stop())
        events.append(self._start({**_tool_use(part), "input": {}}))
        events.append(_event("content_block_delta", index=self._sent, delta=delta))
        self._open = "tool_use"
        events.append(self._stop())
        return events

    def _start(self, block: Mapping[str, Any]) -> bytes:
        return _event("content_block_start", index=self._sent, content_block=block)

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._sent += 1
        return _event("content_block_stop", index=self._sent - 1)

    def finish(self, index: int, choice: Choice) -> bytes:
        """Return the end of the last block; `end` says why the message ended."""
        del index
        self._choice = choice
        return self._stop()

    def end(self, counts: Counts) -> bytes:
        """Return the end of the stream."""
        delta = {
            "stop_reason": _reason(self._choice),
            "stop_sequence": _stop_sequence(self._choice),
        }
        return _event("message_delta", delta=delta, usage=_usage(counts)) + _event("message_stop")

    def whole(self, choices: Sequence[Choice], counts: Counts) -> bytes:
        """Return the whole answer."""
        [choice] = choices
        reason, usage = _reason(choice), _usage(counts)
        return orjson.dumps(self._message(self._blocks, reason, _stop_sequence(choice), usage))

    def _message(
        self,
        content: Sequence[Mapping[str, Any]],
        reason: str | None,
        stop_sequence: str | None,
        usage: Mapping[str, int],
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }


def _kind_of(part: str) -> str:
    """Return the type of the block that has a part, which is also the name of its text there."""
    return "thinking" if isinstance(part, Thought) else "text"


def _empty(kind: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    arguments = orjson.Fragment(call.arguments_json)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _reason(choice: Choice) -> str:
    if not choice.is_complete:
        return "max_tokens"
    if choice.has_calls:
        return "tool_use"
    return "stop_sequence" if choice.found_stop is not None else "end_turn"


def _stop_sequence(choice: Choice) -> str | None:
    return choice.found_stop if _reason(choice) == "stop_sequence" else None


def _usage(counts: Counts) -> dict[str, int]:
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.sampled,
    }
