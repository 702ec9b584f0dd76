"""Answers of a head to a model that says a given text: everything but the model itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tinkercloud_protocol.requests.tensors import SampledSequence
from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, byte_tokenizer
from tinkercloud_testing.training.engines import a_sampling_request
from tinkercloud_worker.chat import anthropic_messages, openai_requests
from tinkercloud_worker.chat.anthropic_messages import MessageAnswer
from tinkercloud_worker.chat.conversation import Asked, Choice
from tinkercloud_worker.chat.openai_answers import ChatAnswer, CompletionAnswer
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.engine.sampling.sampler_interface import SampledToken, StopRules
from tinkercloud_worker.engine.sampling.stopping import StopStringSearch, cut_at_stop
from tinkercloud_worker.head.serve.chat_endpoints import Run, WireAnswer

HERMES_TEMPLATE = """
{%- if tools %}{{ '<tools>' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}
{{- 'Answer with <tool_call>.' }}{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
"""In the manner of Qwen 2.5."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|x|>")
_TOOL = {"name": "lookup", "parameters": {"type": "object"}}


def a_text(
    *special: str, template: str | dict[str, str] | None = HERMES_TEMPLATE
) -> tuple[ChatText, PreTrainedTokenizerFast]:
    """Return the text of a model with special tokens, and its tokenizer of bytes.

    Args:
        special: special tokens in addition to `SPECIAL`.
        template: its chat template, or several by name.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=True) for each in (*SPECIAL, *special)])
    tokenizer.chat_template = template
    return ChatText(tokenizer), tokenizer


@dataclass(frozen=True)
class Said:
    """What a client receives, whole or put together from a stream."""

    text: str
    calls: list[tuple[str, str]]
    """Names and arguments, as the answer has them."""
    reason: str
    stop: str | None = None
    """The stop sequence, if the format has it."""
    num_tokens: int = 0
    """Sampled tokens that are counted."""
    blocks: tuple[str, ...] = ()
    """Types of the blocks, if the format has them."""
    thought: str = ""
    """The reasoning that is separated from the text."""


def openai_says(
    text: ChatText, said: Sequence[int], *, streams: bool, tools: Any = False, **fields: Any
) -> list[Said]:
    """Return the choices of a chat completion in which each sample says the same tokens.

    Args:
        text: the model's text.
        said: the tokens.
        streams: whether the answer is a stream.
        tools: the tools that are offered; True for one without parameters.
        fields: further fields of the request.
    """
    content: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    if tools:
        content["tools"] = [{"type": "function", "function": _TOOL}] if tools is True else tools
    request = openai_requests.read_chat(_body(content, fields, streams=streams))
    asked = request.ask(text)
    body = _answered(ChatAnswer(request, asked, text), asked, text, said)
    if streams:
        return _of_chunks(body, asked.num_choices)
    return [
        Said(
            each["message"]["content"] or "",
            _functions(each["message"].get("tool_calls", [])),
            each["finish_reason"],
            num_tokens=json.loads(body)["usage"]["completion_tokens"],
            thought=each["message"].get("reasoning_content", ""),
        )
        for each in json.loads(body)["choices"]
    ]


def completion_says(
    text: ChatText, said: Sequence[int], *, streams: bool, **fields: Any
) -> list[Said]:
    """Return the choices of a completion in which each sample says the same tokens."""
    content: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 400}
    request = openai_requests.read_completion(_body(content, fields, streams=streams))
    asked = request.ask(text)
    body = _answered(CompletionAnswer(request, asked, text), asked, text, said)
    events = _events(body) if streams else [json.loads(body)]
    found = []
    for index in range(asked.num_choices * len(asked.prompts)):
        parts = [c for each in events for c in each["choices"] if c["index"] == index]
        reason = next(each["finish_reason"] for each in parts if each["finish_reason"])
        found.append(Said("".join(each["text"] for each in parts), [], reason))
    return found


def anthropic_says(
    text: ChatText, said: Sequence[int], *, streams: bool, tools: Any = False, **fields: Any
) -> Said:
    """Return a message in which the model says these tokens; see `openai_says`."""
    content: dict[str, Any] = {
        "model": "m",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "hi"}],
    }
    if tools:
        own = [{"name": "lookup", "input_schema": _TOOL["parameters"]}]
        content["tools"] = own if tools is True else tools
    asked = anthropic_messages.read_messages(_body(content, fields, streams=streams)).ask(text)
    body = _answered(MessageAnswer(asked), asked, text, said)
    return _of_message_events(body) if streams else _of_message(body)


def _body(content: dict[str, Any], fields: dict[str, Any], *, streams: bool) -> bytes:
    return orjson.dumps({**content, "stream": streams, **fields})


def _answered(answer: WireAnswer, asked: Asked, text: ChatText, said: Sequence[int]) -> bytes:
    ends = text.turn_ends | {EOS_TOKEN_ID}
    choices = [
        Choice(text, prompt, ends, asked.stops, asked.reader(text), asked.thoughts(text, prompt))
        for prompt in asked.prompts
        for _ in range(asked.num_choices)
    ]
    run = Run(asked, answer, choices, num_prompt_tokens=len(asked.prompts[0]))
    body = answer.begin(len(choices)) if asked.streams else b""
    for index, prompt in enumerate(asked.prompts):
        sequence = _sampled(prompt, said[: asked.params.max_tokens], asked, text, ends)
        if asked.streams:
            for token in sequence.tokens:
                for choice in range(asked.num_choices):
                    body += run.take(index, SampledToken(choice, token, -1.0, None))
        result = {
            "tokens": list(sequence.tokens),
            "logprobs": [-1.0] * len(sequence.tokens),
            "stop_reason": "stop" if sequence.stopped else "length",
        }
        whole = {"prompt_cache_hit_tokens": 0, "sequences": [result] * asked.num_choices}
        body += run.take(index, whole)
    return body + answer.end(run.counts) if asked.streams else answer.whole(choices, run.counts)


def _sampled(
    prompt: Sequence[int], said: Sequence[int], asked: Asked, text: ChatText, ends: frozenset[int]
) -> SampledSequence:
    """Return the tokens up to where samplers end them: the same by either way to find it."""
    stop = StopRules(ends, asked.stops)
    request = a_sampling_request(list(prompt), stop=stop)
    drawn = SampledSequence(list(said), [-1.0] * len(said), stopped=False, top=None)
    cut = cut_at_stop(drawn, request, text.decode_all)
    if asked.stops:
        search = StopStringSearch(asked.stops, text.decode_all, prompt)
        ended = [n for n, token in enumerate(said, 1) if search.completes(token) or token in ends]
        assert len(cut.tokens) == next(iter(ended), len(said))
    return cut


def _functions(calls: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _events(stream: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def _of_chunks(stream: bytes, num_choices: int) -> list[Said]:
    events, found = _events(stream), []
    for index in range(num_choices):
        parts = [c for each in events for c in each["choices"] if c["index"] == index]
        texts = [each["delta"].get("content") or "" for each in parts]
        calls = [call for each in parts for call in each["delta"].get("tool_calls", [])]
        [reason] = [each["finish_reason"] for each in parts if each["finish_reason"]]
        thoughts = [each["delta"].get("reasoning_content") or "" for each in parts]
        found.append(Said("".join(texts), _functions(calls), reason, thought="".join(thoughts)))
    return found


def _of_message(body: bytes) -> Said:
    # Numbers stay as they were written.
    message = json.loads(body, parse_float=str, parse_int=str)
    blocks = message["content"]
    start = body.index(b'"content":') if blocks else 0
    return Said(
        "".join(block.get("text", "") for block in blocks),
        [(each["name"], _raw_input(body, start, each)) for each in _uses(blocks)],
        message["stop_reason"],
        message["stop_sequence"],
        int(message["usage"]["output_tokens"]),
        tuple(block["type"] for block in blocks),
        "".join(block.get("thinking", "") for block in blocks),
    )


def _uses(blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for block in blocks if block["type"] == "tool_use"]


def _raw_input(body: bytes, start: int, block: dict[str, Any]) -> str:
    """Return the input of a block as the body has it."""
    text = body.decode()
    where = text.index(block["id"], start)
    at = text.index('"input":', where) + len('"input":')
    _, end = json.JSONDecoder().raw_decode(text, at)
    return text[at:end]


def _of_message_events(stream: bytes) -> Said:
    events = _events(stream)
    blocks = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    deltas = [each for each in events if each["type"] == "content_block_delta"]
    inputs = {
        each["index"]: each["delta"]["partial_json"]
        for each in deltas
        if each["delta"]["type"] == "input_json_delta"
    }
    texts = [each["delta"].get("text", "") for each in deltas]
    [last] = [each for each in events if each["type"] == "message_delta"]
    return Said(
        "".join(texts),
        [
            (block["name"], inputs[index])
            for index, block in enumerate(blocks)
            if block["type"] == "tool_use"
        ],
        last["delta"]["stop_reason"],
        last["delta"]["stop_sequence"],
        last["usage"]["output_tokens"],
        tuple(block["type"] for block in blocks),
        "".join(each["delta"].get("thinking", "") for each in deltas),
    )
