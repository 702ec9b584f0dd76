"""The given GPUs: their memory, their number, and the number per node."""

import re
from dataclasses import dataclass

GIB = 1 << 30

MEMORY_GIB = {
    "L4-24": 22,
    "A100-40": 39,
    "A100-80": 79,
    "H100-80": 79,
    "H200-141": 139,
    "B200-192": 178,
}
"""Memory reported by the driver, in GiB, rounded down."""
_ALIASES = {"L4": "L4-24", "H100": "H100-80", "H200": "H200-141", "B200": "B200-192"}
_TEXT = re.compile(r"([0-9]{1,4})x(.+)")
_NODES = re.compile(r"([0-9]{1,4})x([0-9]{1,4})x(.+)")
_MEMORY = re.compile(r"([0-9]{1,4})GiB")
_CONTEXT_BYTES = 3 << 29
"""CUDA context and buffers of NCCL and cuBLAS of one process."""
_FRAGMENTATION = 0.08
"""Share of a GPU's memory that an engine's allocator loses to fragmentation."""


class UnknownGpus(ValueError):
    """An invalid description of GPUs; the message says what is accepted."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU."""

    name: str
    memory: int
    """Memory in bytes."""

    def contexts(self, processes: int) -> int:
        """Return the bytes that no allocator can use if so many processes share the GPU."""
        return processes * _CONTEXT_BYTES

    def reserve(self, processes: int) -> int:
        """Return the bytes that an engine keeps free of tensors if so many processes share it."""
        return int(self.memory * _FRAGMENTATION) + self.contexts(processes)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal GPUs on equal nodes, all of which are used."""

    gpu: Gpu
    count: int
    per_node: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.per_node <= 16:
            raise UnknownGpus(f"GPUs per node: {self.per_node}; accepted: 1 to 16")
        if self.count < 1 or (self.count > self.per_node and self.count % self.per_node):
            raise UnknownGpus(
                f"{self}: does not fill nodes of {self.per_node} GPUs; use a multiple of"
                f" {self.per_node}, or set the number of GPUs per node (--gpus-per-node)"
            )

    def share(self, sessions: int) -> "Fleet":
        """Return the GPUs of each of so many sessions: an equal part of a node, or whole nodes.

        Raises:
            UnknownGpus: There are fewer GPUs than sessions.
        """
        most = self.count // sessions
        if not most:
            raise UnknownGpus(
                f"{sessions} sessions need as many GPUs, but there are {self}: at most {self.count}"
                " sessions can divide them"
            )
        parts = [n for n in range(1, self.per_node + 1) if not self.per_node % n and n <= most]
        count = most - most % self.per_node if most >= self.per_node else parts[-1]
        return Fleet(self.gpu, self.count if sessions == 1 else count, self.per_node)

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.name}"


def gpu(name: str) -> Gpu:
    """Return the GPU with a name such as `H100` or `A100-40`, or of a size such as `48GiB`.

    Raises:
        UnknownGpus: The name is unknown.
    """
    if match := _MEMORY.fullmatch(name):
        return Gpu(name, int(match[1]) * GIB)
    known = _ALIASES.get(name.upper(), name.upper())
    if known not in MEMORY_GIB:
        raise UnknownGpus(
            f"GPU {name!r} is unknown; accepted: {', '.join(MEMORY_GIB)}, or the memory of"
            " another type, such as 48GiB"
        )
    return Gpu(known, MEMORY_GIB[known] * GIB)


def parse(text: str, per_node: int = 8) -> Fleet:
    """Return the GPUs that a text such as `8xH100` describes.

    Raises:
        UnknownGpus: The text is invalid.
    """
    if nodes := _NODES.fullmatch(text.strip()):
        total = int(nodes[1]) * int(nodes[2])
        raise UnknownGpus(
            f"GPUs {text!r}: use the total number, such as {total}x{nodes[3]}, and set the number"
            f" of GPUs per node separately (--gpus-per-node {nodes[2]})"
        )
    match = _TEXT.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise UnknownGpus(
            f"GPUs {text!r}: expected a positive number, x and a type, such as 8xH100"
        )
    return Fleet(gpu(match[2]), int(match[1]), per_node)
