"""The served model's tokenizer and chat template: conversations to tokens, tokens to text.

A sample has one text, in which special tokens are written out (`engine.growing_text`). Stop strings
are searched in it, by samplers and here. What a client receives is this text up to a stop string,
without hidden tokens: those that end a turn, and special ones other than marks of the model's
output.
"""

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.chat.answer_parts import suffix_length
from tinkercloud_worker.chat.exact_values import ExactValues
from tinkercloud_worker.chat.prompt_limits import check_text
from tinkercloud_worker.chat.rules.answer_rules import (
    THINK,
    THINK_END,
    AnswerRule,
    Function,
    Reasoning,
)
from tinkercloud_worker.chat.token_bytes import TokenBytes
from tinkercloud_worker.chat.tool_formats.known import FORMATS, HERMES, format_of
from tinkercloud_worker.chat.tool_formats.tool_format import CallReader, ToolFormat
from tinkercloud_worker.engine.sampling.growing_text import GrowingText, decoder_of

_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>"),
    *("<|call|>", "<|return|>"),
)
"""Tokens with which the templates of public families end a turn."""
_END_TOKENS = 32
"""Tokens that hold a mark at the end of a prompt, and white space after it."""
_SHOWN_CHARACTERS = 1000
"""Maximum length of a template's error in ours."""
_MARKS = re.compile("think|thought|reason|channel|tool.?call", re.IGNORECASE)
"""Names of special tokens that mark reasoning, channels and tool calls in a model's output."""
_CHANNEL, _CHANNEL_TURN = "<|channel|>", "<|start|>assistant"
_CHANNEL_MARKS = frozenset({"<|start|>", "<|message|>", "<|constrain|>", "<|end|>"})
"""Further marks in the output of models with channels (OpenAI's Harmony format)."""


class ChatText:
    """The tokenizer of a model, for conversations and completions. Thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int = sys.maxsize,
        vocab_size: int = 1 << 31,
    ) -> None:
        """Prepare the text of a model.

        Args:
            tokenizer: its tokenizer.
            max_tokens: its context length; longer prompts are refused.
            vocab_size: of the model; other token ids in prompts are refused.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self.bytes_of = TokenBytes(tokenizer).of
        """Returns the bytes of a token; None if its tokenizer does not define them."""
        self._templates = _templates_of(tokenizer)
        ids: dict[str, int] = tokenizer.get_vocab()
        self.num_tokens = max(ids.values()) + 1
        """Tokens of the tokenizer; the model may have more, which mean nothing."""
        self.turn_ends = frozenset(
            ids[mark]
            for mark in _TURN_ENDS
            if mark in ids and any(mark in template for template in self._templates.values())
        )
        """Tokens that end a turn, in addition to the model's end tokens."""
        self._format: ToolFormat | None = format_of(self._tool_template)
        self.hidden = _hidden_of(tokenizer, self._format.marks if self._format else ())
        """Special tokens that clients do not see."""
        self.decode_all = decoder_of(tokenizer)
        """Decodes tokens to the text in which stop strings are searched."""

    @property
    def calls_tools(self) -> bool:
        """Whether the template has tools, called in a known format.

        Tokenizers that can't write the marks of the format as they are make no calls that could
        be found.
        """
        template = self._tool_template
        if self._format is None or "tools" not in template:
            return False
        marks = [mark for mark in self._format.marks if mark in template]
        return all(self.decode(self.encode_part(mark)) == mark for mark in marks)

    def uses(self, variable: str) -> bool:
        """Return whether a chat template of the model uses a variable."""
        return any(variable in template for template in self._templates.values())

    def reader(self, offered: Sequence[Function]) -> CallReader | None:
        """Return what finds the calls in an answer; None if all of it is text.

        Args:
            offered: the tools that the model may call.
        """
        return None if self._format is None else self._format.reader(offered)

    def source(self, rule: AnswerRule, prompt: Sequence[int]) -> str:
        """Return the grammar of a rule for the answer to a prompt.

        Raises:
            InvalidRequest: the format of tool calls can't express a schema or a name.
        """
        return (self._format or HERMES).source(rule, self.reasoning_after(prompt))

    @property
    def _tool_template(self) -> str:
        return self._templates.get("tool_use", self._templates.get("default", ""))

    def reasoning_after(self, prompt: Sequence[int]) -> Reasoning:
        """Return whether the answer to a prompt begins with reasoning (`<think>`, or a channel)."""
        end = self.decode_all(list(prompt[-_END_TOKENS:])).rstrip()
        if end.endswith(_CHANNEL_TURN):
            return Reasoning.POSSIBLE
        if THINK_END not in self._tool_template:
            return Reasoning.NONE
        if end.endswith(THINK):
            return Reasoning.OPEN
        return Reasoning.NONE if end.endswith(THINK_END) else Reasoning.POSSIBLE

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text to continue, with those that begin a text of the model.

        Raises:
            ContextLengthExceeded: the text is certainly too long.
        """
        check_text(text, self._max_tokens, self._count, "prompt")
        return list(self._tokenizer.encode(text))

    def check_tokens(self, tokens: Sequence[int], field: str) -> None:
        """Check the tokens of a client, before they are decoded: tokenizers fail on other numbers.

        Raises:
            InvalidRequest: one is outside the vocabulary of the model.
        """
        outside = next((each for each in tokens if not 0 <= each < self._vocab_size), None)
        if outside is not None:
            raise InvalidRequest(
                f"{field}: token ids must be in 0..{self._vocab_size - 1} (the model's vocabulary),"
                f" got {str(outside)[:40]}"
            )

    def encode_part(self, text: str) -> list[int]:
        """Return the tokens of a part of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _count(self, text: str) -> int:
        return len(self.encode_part(text))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        continues_last: bool = False,
    ) -> list[int]:
        """Return the tokens of a conversation, up to where the model's next turn begins.

        Args:
            messages: the messages, as chat templates of transformers receive them.
            tools: the functions that the model may call, as JSON schemas.
            options: further variables of the template.
            continues_last: whether the model continues the last message.

        Raises:
            InvalidRequest: the model has no template, or its template rejects the conversation.
            ContextLengthExceeded: the conversation is certainly too long.
        """
        if not self._templates:
            raise InvalidRequest(
                "messages: this model has no chat template; use completions with a prompt"
            )
        if tools and not self.calls_tools:
            known = ", ".join(each.name for each in FORMATS)
            raise InvalidRequest(
                "tools: not supported for this model: its chat template must write tool calls in a"
                f" known format ({known}), and its tokenizer must keep the marks of this format;"
                " send a request without tools"
            )
        if self._format is not None:
            messages = self._format.history(messages)
        exact = ExactValues()
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                exact.held(_marked(messages, exact.mark) if continues_last else messages),
                tools=exact.held(tools) or None,
                add_generation_prompt=not continues_last,
                tokenize=False,
                **options,
            )
            if continues_last:
                rendered = _continued(rendered, exact.mark, str(messages[-1]["content"]))
            text = exact.restored(rendered)
        except InvalidRequest:
            raise
        except Exception as error:  # noqa: BLE001 - a template may fail in any way on odd input
            # Some of transformers' messages contain the whole conversation.
            why = str(error)[:_SHOWN_CHARACTERS]
            raise InvalidRequest(
                f"messages: the model's chat template rejects this conversation: {why}"
            ) from None
        check_text(text, self._max_tokens, self._count, "messages")
        return self.encode_part(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without hidden ones."""
        return self.decode_all([token for token in tokens if token not in self.hidden])

    def name(self, token: int) -> str:
        """Return the text of a single token, also of a special one."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


class ShownText:
    """The text of a sample that a client receives, token by token."""

    def __init__(
        self, text: ChatText, prompt: Sequence[int], ends: Collection[int], stops: Sequence[str]
    ) -> None:
        """Start before the first token.

        Args:
            text: the model's text.
            prompt: tokens before the sample.
            ends: tokens that end it, which are hidden.
            stops: stop strings.
        """
        self._growing = GrowingText(text.decode_all, prompt)
        self._hidden = text.hidden.union(ends)
        self._until = UntilStop(stops)

    @property
    def found_stop(self) -> str | None:
        """The stop string that ended it; None if something else did."""
        return self._until.found

    def add(self, token: int) -> str:
        """Append a token; return the text that has become certain."""
        if token not in self._hidden:
            return self._until.add(self._growing.add(token))
        before = self._until.add(self._growing.finish())
        mark = self._growing.add(token) + self._growing.finish()
        return before + self._until.add_hidden(mark)

    def finish(self) -> str:
        """Return the rest of the text, which may end with an incomplete character."""
        return self._until.add(self._growing.finish()) + self._until.finish()


class UntilStop:
    """Passes a text on until a stop string, which is removed. Holds back what may become one.

    A stop string may lie in hidden text, which is never passed on. Of several, the one counts that
    is complete first, and of those the longest: so the text does not depend on its tokens.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self._is_shown: list[bool] = []
        """For each held character."""
        self.found: str | None = None
        """The stop string that was found; further text is dropped."""

    def add(self, text: str) -> str:
        """Append text; return what certainly lies before any stop string."""
        return self._append(text, is_shown=True)

    def add_hidden(self, text: str) -> str:
        """Append text that is searched, but not passed on; return what has become certain."""
        return self._append(text, is_shown=False)

    def _append(self, text: str, *, is_shown: bool) -> str:
        if self.found is not None:
            return ""
        self._is_shown += [is_shown] * len(text)
        self._held += text
        ends = [
            (start + len(each), start)
            for each in self._strings
            if (start := self._held.find(each)) >= 0
        ]
        if ends:
            end, start = min(ends)
            self.found = self._held[start:end]
            return self._passed(start)
        keep = max((suffix_length(self._held, each) for each in self._strings), default=0)
        return self._passed(len(self._held) - keep)

    def finish(self) -> str:
        """Return the text that was held back."""
        return "" if self.found is not None else self._passed(len(self._held))

    def _passed(self, length: int) -> str:
        """Remove the beginning of the held text; return what is shown of it."""
        shown = "".join(compress(self._held[:length], self._is_shown))
        self._held, self._is_shown = self._held[length:], self._is_shown[length:]
        return shown


def _templates_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name; a single one is "default"."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return {str(name): str(each) for name, each in template.items()}
    return {"default": str(template)} if template else {}


def _hidden_of(tokenizer: PreTrainedTokenizerBase, marks: Collection[str]) -> frozenset[int]:
    """Return the special tokens of a tokenizer that are no marks of the model's output.

    Args:
        tokenizer: the tokenizer.
        marks: those of the format of tool calls.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {token: str(mark.content) for token, mark in added if mark.special}
    names = tokenizer.convert_ids_to_tokens(tokenizer.all_special_ids)
    special |= dict(zip(tokenizer.all_special_ids, names, strict=True))
    further = _CHANNEL_MARKS if _CHANNEL in special.values() else frozenset()
    return frozenset(
        token
        for token, name in special.items()
        if not (_MARKS.search(name) or name in further or name in marks)
    )


def _marked(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    """Return messages with a mark at the end of the last one's text, which is to be continued."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": str(last["content"]) + mark}]


def _continued(rendered: str, mark: str, content: str) -> str:
    """Return a rendered conversation up to the mark, with all white space of the last message.

    Raises:
        ValueError: the template does not render the message as it is.
    """
    before, found, _ = rendered.rpartition(mark)
    stripped = content.lstrip()
    if not found or not before.endswith(stripped):
        raise ValueError("it changes or leaves out the last message, which is to be continued")
    return before.removesuffix(content if before.endswith(content) else stripped) + content
