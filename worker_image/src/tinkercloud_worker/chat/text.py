"""The served model's tokenizer and chat template: conversations to tokens, tokens to text."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_worker.chat.prompt_limits import check_text
from tinkercloud_worker.chat.token_bytes import TokenBytes

_INCOMPLETE = "\ufffd"
"""Decoded text of bytes that do not form a (complete) character."""
_MAX_HELD_TOKENS = 8
"""Tokens without a complete character after which their text is returned anyway."""
_CONTEXT_TOKENS = 4
"""Tokens before a text that are decoded with it: decoders treat the first token differently."""
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>")
"""Tokens with which the templates of public families end a turn."""
_SHOWN_CHARACTERS = 1000
"""Maximum length of a template's error in ours."""
HERMES_CALL = "<tool_call>"


class ChatText:
    """The tokenizer of a model, for conversations and completions. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int = sys.maxsize) -> None:
        """Prepare the text of a model.

        Args:
            tokenizer: its tokenizer.
            max_tokens: its context length; longer prompts are refused.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self.bytes_of = TokenBytes(tokenizer).of
        """Returns the bytes of a token; None if its tokenizer does not define them."""
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else ""
        self._has_template = bool(template)
        ids: dict[str, int] = tokenizer.get_vocab()
        self.turn_ends = frozenset(
            ids[mark] for mark in _TURN_ENDS if mark in self._template and mark in ids
        )
        """Tokens that end a turn, in addition to the model's end tokens."""

    @property
    def calls_tools(self) -> bool:
        """Whether the template has tools, called in Hermes' format (also that of Qwen 2.5 and 3).

        Others that use the same tag write parameters as XML.
        """
        template = self._template
        return "tools" in template and HERMES_CALL in template and "<function=" not in template

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text to continue, with those that begin a text of the model.

        Raises:
            ContextLengthExceeded: the text is certainly too long.
        """
        check_text(text, self._max_tokens, self._count, "prompt")
        return list(self._tokenizer.encode(text))

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
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
        if not self._has_template:
            raise InvalidRequest(
                "messages: this model has no chat template; use completions with a prompt"
            )
        if tools and not self.calls_tools:
            raise InvalidRequest(
                "tools: not supported for this model: only templates with tool calls in Hermes'"
                f" format ({HERMES_CALL} with JSON) are; send a request without tools"
            )
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=not continues_last,
                continue_final_message=continues_last,
                tokenize=False,
                **options,
            )
        except Exception as error:  # noqa: BLE001 - a template may fail in any way on odd input
            # Some of transformers' messages contain the whole conversation.
            why = str(error)[:_SHOWN_CHARACTERS]
            raise InvalidRequest(
                f"messages: the model's chat template rejects this conversation: {why}"
            ) from None
        check_text(rendered, self._max_tokens, self._count, "messages")
        return list(self._tokenizer.encode(rendered, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def name(self, token: int) -> str:
        """Return the text of a single token, also of a special one."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


class GrowingText:
    """Decodes a sequence token by token, and returns complete characters only."""

    def __init__(self, text: ChatText, prompt: Sequence[int]) -> None:
        """Start before the first token.

        Args:
            text: the decoder.
            prompt: tokens before the sequence.
        """
        self._decode = text.decode
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._settled = len(self._window)
        """Number of tokens of the window whose text was returned, or belongs to the prompt."""

    def add(self, token: int) -> str:
        """Append a token; return the text that has become certain."""
        self._window.append(token)
        return self._take(is_last=len(self._window) - self._settled >= _MAX_HELD_TOKENS)

    def finish(self) -> str:
        """Return the rest of the text, which may end with an incomplete character."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> str:
        before = self._decode(self._window[: self._settled])
        whole = self._decode(self._window)
        if len(whole) <= len(before) and is_last:
            # Special tokens have no text. If they stayed in the window, a model that repeats one
            # would have all of them decoded again at each.
            del self._window[self._settled :]
        if len(whole) <= len(before) or (whole.endswith(_INCOMPLETE) and not is_last):
            return ""
        self._window = self._window[max(self._settled - _CONTEXT_TOKENS, 0) :]
        # These tokens are the context of the next ones.
        self._settled = len(self._window)
        return whole[len(before) :]


class UntilStop:
    """Passes a text on until a stop string, which is removed. Holds back what may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; further text is dropped."""

    def add(self, text: str) -> str:
        """Append text; return what certainly lies before any stop string."""
        if self.found is not None:
            return ""
        self._held += text
        starts = [(self._held.find(each), each) for each in self._strings if each in self._held]
        if starts:
            start, self.found = min(starts)
            passed, self._held = self._held[:start], ""
            return passed
        keep = max((suffix_length(self._held, each) for each in self._strings), default=0)
        split = len(self._held) - keep
        passed, self._held = self._held[:split], self._held[split:]
        return passed

    def finish(self) -> str:
        """Return the text that was held back."""
        rest, self._held = self._held, ""
        return rest


def suffix_length(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that `mark` begins with, but is longer."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
