"""The prefix cache: keys and values of recent prompts, for prompts with a common prefix.

Rollouts of the same prompt, or the next turn of a conversation, then compute only the new tokens.
Entries belong to one version of the weights and never change.
"""

import threading
from collections import OrderedDict

from tinkercloud_protocol.tensors import Int32Array
from tinkercloud_worker.torch_sampler.cache import KeyValues
from tinkercloud_worker.torch_sampler.versions import Version


class PrefixStore:
    """The most recently used prompts, up to a number of tokens. Thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[Version, bytes], tuple[Int32Array, KeyValues]]
        self._entries = OrderedDict()

    def find(self, version: Version, prompt: Int32Array, at_most: int) -> tuple[int, KeyValues]:
        """Return the longest cached prefix of a prompt: its length and its keys and values."""
        best, best_key = 0, None
        with self._lock:
            for key, (tokens, _) in self._entries.items():
                if key[0] is version:
                    length = min(common_length(tokens, prompt), at_most)
                    if length > best:
                        best, best_key = length, key
            if best_key is None:
                return 0, ()
            self._entries.move_to_end(best_key)
            return best, tuple(layer.first(best) for layer in self._entries[best_key][1])

    def add(self, version: Version, prompt: Int32Array, key_values: KeyValues) -> None:
        """Cache a fully prefilled prompt."""
        key = (version, prompt.tobytes())
        with self._lock:
            if key in self._entries or len(prompt) > self._max_tokens:
                return
            self._entries[key] = (prompt, key_values)
            self._tokens += len(prompt)
            while self._tokens > self._max_tokens:
                self._drop(next(iter(self._entries)))

    def forget(self, version: Version) -> None:
        """Remove all prompts of a version."""
        with self._lock:
            for key in [key for key in self._entries if key[0] is version]:
                self._drop(key)

    def clear(self) -> None:
        """Remove all prompts."""
        with self._lock:
            self._entries.clear()
            self._tokens = 0

    def _drop(self, key: tuple[Version, bytes]) -> None:
        tokens, _ = self._entries.pop(key)
        self._tokens -= len(tokens)


def common_length(one: Int32Array, other: Int32Array) -> int:
    """Return the length of the common prefix of two prompts."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
