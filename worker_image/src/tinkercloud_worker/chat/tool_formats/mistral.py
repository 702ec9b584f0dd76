"""Tool calls of Mistral's models, after `[TOOL_CALLS]`.

[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]      in a list, up to version 7
[TOOL_CALLS]f[ARGS]{...}                                   each with its name, from version 11 on

The name may be followed by `[CALL_ID]` and an id. Templates accept ids of nine letters and digits
only, so calls get such ids, and others in the history are replaced by them.
"""

import hashlib
import json
import re
import secrets
import string
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.exact_json import DECODER, has_half
from tinkercloud_worker.chat.answer_parts import ToolCall
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, Reasoning
from tinkercloud_worker.chat.rules.lark import json_rule, literal
from tinkercloud_worker.chat.tool_formats.call_reader import (
    MarkedForm,
    MarkedReader,
    Marking,
    marked_source,
)
from tinkercloud_worker.chat.tool_formats.json_calls import SPACE, JsonEnd, calls_in
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader, ToolFormat

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(
    r"\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*)?(?P<arguments>\{.*)",
    re.DOTALL,
)
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
_OWN_ID = re.compile(f"[A-Za-z0-9]{{{_ID_LENGTH}}}")


class _Mistral(ToolFormat):
    """What both formats share."""

    def reader(self, offered: Sequence[Function]) -> CallReader | None:
        """Return a reader; see `ToolFormat`."""
        return MarkedReader(self._marking) if offered else None

    def source(self, rule: AnswerRule, reasoning: Reasoning) -> str:
        """Return the grammar of a rule; see `ToolFormat`."""
        return marked_source(rule, reasoning, self._form(rule))

    @property
    @abstractmethod
    def _marking(self) -> Marking:
        """How calls are marked."""

    @abstractmethod
    def _form(self, rule: AnswerRule) -> MarkedForm:
        """Return how calls may be written."""

    def history(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages with ids that templates accept."""
        return [_with_own_ids(message) for message in messages]


class MistralList(_Mistral):
    """Calls in a list."""

    name = "Mistral with a list"
    marks = (_BEGIN,)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""
        return _BEGIN in template and _ARGUMENTS not in template

    @property
    def _marking(self) -> Marking:
        def search(start: int) -> JsonEnd:
            return JsonEnd(start, "[")

        return Marking(_BEGIN, "", search, lambda text: _with_ids(calls_in(text)))

    def _form(self, rule: AnswerRule) -> MarkedForm:
        rules = []
        for number, function in enumerate(rule.functions):
            name = json.dumps(function.name, ensure_ascii=False)
            begin = literal(f'{{"name": {name}, "arguments": ')
            rules.append(f'call_{number}: {begin} json_{number} "}}"')
            rules.append(json_rule(f"json_{number}", function.schema))
        call = f"({' | '.join(f'call_{number}' for number in range(len(rule.functions)))})"
        calls = call if rule.is_one_call else f'{call} ("," " "? {call})*'
        return MarkedForm(_BEGIN, f'" "? "[" {calls} "]"', None, rules)


class MistralNamed(_Mistral):
    """Calls that each have the mark and a name."""

    name = "Mistral with names"
    marks = (_BEGIN, _ID, _ARGUMENTS)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""
        return _BEGIN in template and _ARGUMENTS in template

    @property
    def _marking(self) -> Marking:
        def search(start: int) -> JsonEnd:
            return JsonEnd(start, "{")

        return Marking(_BEGIN, "", search, lambda text: _with_ids(_named_call_in(text)))

    def _form(self, rule: AnswerRule) -> MarkedForm:
        rules = []
        for number, function in enumerate(rule.functions):
            if not re.fullmatch(r"[^\s\[{]+", function.name):
                raise InvalidRequest(
                    f"{function.field}: the tool call format of this model has no place for the"
                    f" name {function.name!r}; send a name without spaces, '[' and '{{'"
                )
            begin = literal(function.name + _ARGUMENTS)
            rules.append(f"call_{number}: {begin} json_{number}")
            rules.append(json_rule(f"json_{number}", function.schema))
        calls = " | ".join(f"call_{number}" for number in range(len(rule.functions)))
        return MarkedForm(_BEGIN, calls, "", rules)


def _named_call_in(text: str) -> list[ToolCall]:
    """Return the call that follows a mark; none if it is something else."""
    found = _NAMED.fullmatch(text)
    if found is None:
        return []
    arguments = found["arguments"].rstrip(SPACE)
    try:
        is_object = isinstance(DECODER.decode(arguments), dict) and not has_half(arguments)
    except (ValueError, RecursionError):
        return []
    return [ToolCall(found["name"], arguments)] if is_object else []


def _with_ids(calls: Sequence[ToolCall]) -> list[ToolCall]:
    return [replace(call, id=_an_id()) for call in calls]


def _an_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


def _with_own_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _own_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _own_id(call["id"])} for call in message["tool_calls"]
        ]
    return changed


def _own_id(given: str) -> str:
    """Return an id that templates accept, always the same for the same id."""
    if _OWN_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:_ID_LENGTH]
