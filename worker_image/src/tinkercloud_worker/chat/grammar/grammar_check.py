"""`python -m tinkercloud_worker.chat.grammar.grammar_check`: try grammars in a process of its own.

llguidance limits what a step costs, but a few schemas overflow its stack, or make it compute for
hours. So each grammar is tried here once, with limits of the kernel, before the head compiles it.

Reads a JSON list of grammars from stdin. Writes a line with the index of each before it is tried,
and the error of the first that can't be compiled.
"""

import json
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

SECONDS = 2
"""CPU seconds of one check."""
_MAX_MEMORY_BYTES = 1 << 30
LIMITS = LLParserLimits(
    max_lexer_states=10_000,  # 20 MB for each sequence
    max_grammar_size=100_000,
    verbose_errors=False,
)


class _Bytes:
    """A tokenizer with a token for each byte."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def compiled(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar, and compute what its first token may be: some fail only there.

    The matcher has an error if the grammar fails.
    """
    matcher = LLMatcher(tokenizer, source, limits=LIMITS, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _check(sources: Sequence[str]) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    for index, source in enumerate(sources):
        sys.stdout.write(f"{index}\n")
        sys.stdout.flush()
        if error := compiled(tokenizer, source).get_error():
            sys.stdout.write(error)
            return


def main() -> None:
    """Check the grammars of stdin."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    _check(json.load(sys.stdin))


if __name__ == "__main__":
    main()
