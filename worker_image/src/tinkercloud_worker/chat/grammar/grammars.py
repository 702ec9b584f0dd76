"""Compiles the rules of answers to llguidance's matchers, for the tokens of one model.

The text of a sample is what its tokens add to the prompt, with special tokens written out
(`text`): so marks such as `<tool_call>` count as their characters, whether they are one token or
several. Tokens that a client does not see, and those that end a turn, are never part of the text.
"""

import json
import logging
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable
from tinkercloud_worker.chat.grammar.grammar_check import SECONDS, compiled
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, schemas_of
from tinkercloud_worker.chat.text import ChatText

log = logging.getLogger(__name__)

_KEPT = 64
"""Compiled grammars that are kept: agents send the same tools in each turn."""
_PATIENCE_SECONDS = 120
"""For a process that may use `SECONDS` of a busy machine."""
_NO_CHECK = "the session head can't check JSON schemas now; send the request again"
_SHOWN_CHARACTERS = 300
_INDICES = re.compile(r"(?:(\d+)\n)+(.*)", re.DOTALL)
"""The output of a check: the last index, and an error."""
_EMPTY = re.compile(r'"(enum|type|anyOf)":\s*\[\]')
"""A keyword in a schema that allows no value."""


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """See `TokenGrammar`."""

    source: str
    """The grammar in Lark."""
    is_needed: bool
    _field: str
    """A field of the request that has a schema."""
    _template: LLMatcher
    _num_tokens: int

    def matcher(self) -> "Matcher":
        """Return a matcher before the first token."""
        return Matcher(self._template.deep_copy(), self._field, self._num_tokens)


class Matcher:
    """See `TokenMatcher`."""

    def __init__(self, matcher: LLMatcher, field: str, num_tokens: int) -> None:
        self._matcher = matcher
        self._field = field
        self._num_tokens = num_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches the grammar."""
        return self._matcher.is_accepting()

    def allowed(self, ends: Collection[int]) -> npt.NDArray[np.bool_]:
        """Return whether each token may come next; see `TokenMatcher`."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        bits = np.unpackbits(packed, count=self._num_tokens, bitorder="little")
        allowed = bits.view(np.bool_)
        allowed[[token for token in ends if token < self._num_tokens]] = self.is_complete
        return allowed

    def add(self, token: int) -> None:
        """Append a token; see `TokenMatcher`."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(_too_complex(self._field, self._matcher.get_error()))


class _Vocabulary:
    """The tokens of a model, as llguidance reads them."""

    def __init__(self, text: ChatText, ends: Collection[int]) -> None:
        hidden = text.hidden.union(ends)
        known = [text.bytes_of(token) for token in range(text.num_tokens)]
        self.num_unknown = known.count(None)
        self.tokens = [
            b"" if token in hidden or encoded is None else encoded
            for token, encoded in enumerate(known)
        ]
        """Their bytes; a token without any is never allowed."""
        # llguidance needs an end of its own, also for models without one.
        self.eos_token_id = text.num_tokens
        self.tokens.append(b"<end>")
        self.special_token_ids = [self.eos_token_id]
        self.bos_token_id = None
        self._encode = text.encode_part
        self._ids = {encoded: token for token, encoded in enumerate(self.tokens) if encoded}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens of a text that must come next: those of the tokenizer, if they have it."""
        tokens = self._encode(text.decode(errors="ignore"))
        if b"".join(self.tokens[token] for token in tokens) == text:
            return tokens
        tokens = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((each for each in lengths if text[:each] in self._ids), None)
            if length is None:
                return tokens
            tokens.append(self._ids[text[:length]])
            text = text[length:]
        return tokens


class Grammars:
    """The grammars of one model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[tuple[str, ...], str], Grammar | str] = OrderedDict()
        """Compiled grammars, or why they can't be compiled, by the fields of the request, which
        errors name, and their source."""

    def compile(
        self, rule: AnswerRule, text: ChatText, ends: Collection[int], prompt: Sequence[int]
    ) -> Grammar:
        """Compile the rule of an answer. Takes up to some seconds, so call it in a thread.

        Args:
            rule: the rule.
            text: the model's text, the same in all calls.
            ends: tokens that end an answer, the same in all calls.
            prompt: the tokens before the answer.

        Raises:
            InvalidRequest: a grammar can't express a schema, or it is too complex; or the model's
                tokenizer does not define the bytes of its tokens.
        """
        schemas = schemas_of(rule)
        field = schemas[0][0]
        source = text.source(rule, prompt)
        key = (tuple(place for place, _ in schemas), source)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                if isinstance(known, str):
                    raise InvalidRequest(known)
                return known
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(text, ends, field)
            tokenizer = self._tokenizer
        try:
            template = _template(tokenizer, source, schemas)
        except InvalidRequest as error:
            self._keep(key, error.message)
            raise
        grammar = Grammar(source, rule.is_needed, field, template, text.num_tokens)
        self._keep(key, grammar)
        return grammar

    def _keep(self, key: tuple[tuple[str, ...], str], compiled: Grammar | str) -> None:
        with self._lock:
            self._kept[key] = compiled
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


def _tokenizer_of(text: ChatText, ends: Collection[int], field: str) -> LLTokenizer:
    vocabulary = _Vocabulary(text, ends)
    if vocabulary.num_unknown > text.num_tokens // 2:
        raise InvalidRequest(
            f"{field}: not supported for this model, whose tokenizer does not define the bytes of"
            " its tokens; leave it out"
        )
    return LLTokenizer(TokenizerWrapper(vocabulary))


def _template(tokenizer: LLTokenizer, source: str, schemas: Sequence[tuple[str, str]]) -> LLMatcher:
    """Compile a grammar, or name the field of its schema that fails.

    Raises:
        InvalidRequest: it fails.
    """
    field = schemas[0][0]
    try:
        _check([(field, source)])
        return _compiled(tokenizer, source, field)
    except InvalidRequest:
        _check(schemas)
        for place, each in schemas:
            _compiled(tokenizer, each, place)
        raise


def _compiled(tokenizer: LLTokenizer, source: str, field: str) -> LLMatcher:
    """Compile a grammar that was checked: with the tokens of a model, it may still fail.

    Raises:
        InvalidRequest: it fails; the message names the field.
    """
    matcher = compiled(tokenizer, source)
    if error := matcher.get_error():
        raise InvalidRequest(_too_complex(field, error))
    return matcher


def _check(sources: Sequence[tuple[str, str]]) -> None:
    """Try grammars in a process of their own; see `grammar_check`.

    Raises:
        InvalidRequest: one of them fails; the message names its field.
    """
    command = [sys.executable, "-m", "tinkercloud_worker.chat.grammar.grammar_check"]
    asked = json.dumps([source for _, source in sources]).encode()
    try:
        ended = subprocess.run(  # noqa: S603 - our own module
            command, input=asked, capture_output=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("grammars can't be checked", extra={"error": str(error)})
        raise Unavailable(_NO_CHECK) from None
    indices = _INDICES.match(ended.stdout.decode())
    if indices is None:
        log.error("the check of grammars failed", extra={"error": ended.stderr.decode()[-1000:]})
        raise Unavailable(_NO_CHECK)
    field, source = sources[int(indices[1])]
    if ended.returncode:
        raise InvalidRequest(_too_complex(field, f"more than {SECONDS} s or 1 GiB"))
    if why := indices[2]:
        reason = _reason(why)
        if (empty := _EMPTY.search(source)) is not None:
            # llguidance reads them all as alternatives, which it calls anyOf.
            reason = reason.replace("anyOf is empty", f"{empty[1]} is empty")
        raise InvalidRequest(f"{field}: this JSON schema can't be enforced: {reason}")


def _too_complex(field: str, why: str) -> str:
    return (
        f"{field}: a JSON schema is too complex to be enforced ({_reason(why)}); send a simpler one"
    )


def _reason(error: str) -> str:
    """Return what llguidance says, without the lines of our grammar that it shows."""
    said = error.partition("failed to compile JSON schema: ")[2] or error
    said = said.partition("\n   1 | ")[0].partition("\n<non-verbose")[0]
    return " ".join(said.split())[:_SHOWN_CHARACTERS]
