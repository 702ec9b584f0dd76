"""The prefix cache: keys and values of recent prompts, for prompts with a common prefix.

Rollouts of the same prompt, or the next turn of a conversation, then compute only the new tokens.
Entries belong to one version of the weights and never change.
"""

import threading
from collections import OrderedDict

from tinkercloud_worker.torch_sampler.decode.kv_cache import KeyValues
from tinkercloud_worker.torch_sampler.versions import Version
from tinkercloud_worker.vision.prepared import PreparedPrompt
from tinkercloud_worker.vision.spans import around, end_of


class PrefixStore:
    """The most recently used prompts, up to a number of tokens. Thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[Version, bytes], tuple[PreparedPrompt, KeyValues]]
        self._entries = OrderedDict()

    def find(self, version: Version, prompt: PreparedPrompt, at_most: int) -> tuple[int, KeyValues]:
        """Return the longest cached prefix of a prompt: its length and its keys and values.

        A prefix has all tokens of a block of images or none.
        """
        best, best_key = 0, None
        with self._lock:
            for key, (cached, _) in self._entries.items():
                if key[0] is version:
                    length = min(common_length(cached, prompt), at_most)
                    for images in (prompt.images, cached.images):
                        block = around(images, length)
                        length = length if block is None else block.start
                    if length > best:
                        best, best_key = length, key
            if best_key is None:
                return 0, ()
            self._entries.move_to_end(best_key)
            return best, tuple(layer.first(best) for layer in self._entries[best_key][1])

    def add(self, version: Version, prompt: PreparedPrompt, key_values: KeyValues) -> None:
        """Cache a fully prefilled prompt."""
        key = (version, _content(prompt))
        length = len(prompt.tokens)
        with self._lock:
            if key in self._entries or length > self._max_tokens:
                return
            self._entries[key] = (prompt.without_pixels(), key_values)
            self._tokens += length
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
        prompt, _ = self._entries.pop(key)
        self._tokens -= len(prompt.tokens)


def _content(prompt: PreparedPrompt) -> bytes:
    """Return bytes that are equal for equal prompts alone."""
    # Images have placeholders in the tokens, which are the same for all images of a size.
    places = [f"{each.start}:{each.fingerprint.hex()}" for each in prompt.images]
    return ",".join(places).encode() + b";" + prompt.tokens.tobytes()


def common_length(one: PreparedPrompt, other: PreparedPrompt) -> int:
    """Return the length of the common prefix of two prompts, which has no part of an image."""
    shorter = min(len(one.tokens), len(other.tokens))
    differs = one.tokens[:shorter] != other.tokens[:shorter]
    length = int(differs.argmax()) if differs.any() else shorter
    in_one, in_other = ({(i.start, i.fingerprint) for i in p.images} for p in (one, other))
    for image in (*one.images, *other.images):
        is_shared = (image.start, image.fingerprint) in in_one & in_other
        if image.start < length and not (is_shared and end_of(image) <= length):
            length = image.start
    return length
