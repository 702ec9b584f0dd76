"""`python -m tinkercloud_worker.chat.grammar_check`: try grammars, as a process that may fail.

llguidance limits what a step costs, but a few schemas overflow its stack, or make it compute for
hours. So each grammar is tried here once, with limits of the kernel, before the head compiles it.

Reads a JSON list of grammars from stdin. Writes the index and the error of the first that can't be
compiled, as a JSON list, or an empty list.
"""

import json
import resource
import sys
from collections.abc import Sequence

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


def first_failure(sources: Sequence[str]) -> list[int | str]:
    """Return the index and the error of the first grammar that fails; empty if none does."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    for index, source in enumerate(sources):
        matcher = LLMatcher(tokenizer, source, limits=LIMITS, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return [index, matcher.get_error()]
    return []


def main() -> None:
    """Check the grammars of stdin."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    sys.stdout.write(json.dumps(first_failure(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
