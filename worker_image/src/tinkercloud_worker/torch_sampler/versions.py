"""Published weights by name, in memory or, when memory is short, in the scratch folder.

Reinforcement learning publishes a version after every step and mostly uses the last one or two, but
any version may be sampled from again. A version whose name is removed keeps its weights until the
last earlier request has ended.
"""

import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.lora.deltas import can_share_batch
from tinkercloud_worker.lora.segments import ActiveWeights

log = logging.getLogger(__name__)

_PART_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class Version:
    """Published weights, immutable while they are referenced."""

    lora: LoraConfig | None
    in_memory: ActiveWeights | None
    """None: the weights were spilled, or are the base model's own."""
    size_bytes: int
    file: Path
    """The file they are spilled to."""
    checksum: int = 0
    """CRC-32 of the file, once it is written."""
    is_apart: bool = False
    """Whether the weights are so large, or not finite, that a product shared with other adapters
    would change the others' results."""
    is_written: bool = False
    is_spilling: bool = False
    users: int = 1
    """Number of references: its name and requests."""


class Versions:
    """Maps names to weights. Thread-safe; no caller waits for the file of another version."""

    def __init__(
        self,
        scratch_dir: Path,
        max_bytes: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Create an empty collection.

        Args:
            scratch_dir: the folder for spilled weights.
            max_bytes: maximum bytes of weights in memory.
            device: the device of weights in use; None means the CPU.
            dtype: the dtype of full models, which is the base's.
        """
        self._scratch_dir = scratch_dir
        self._max_bytes = max_bytes
        self._device = device or torch.device("cpu")
        self._dtype = dtype
        self._lock = threading.Lock()
        self._names: dict[str, Version] = {}
        self._by_use: OrderedDict[Version, None] = OrderedDict()
        """Referenced versions, least recently used first."""

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def prepare(self, weights: WeightsCopy | None) -> Version:
        """Convert weights for sampling, to pass to `add`; None means the base model's own.

        This takes as long as copying the weights.
        """
        file = self._scratch_dir / f"{uuid4().hex}.safetensors"
        if weights is None:
            return Version(None, None, 0, file)
        active = self._active(weights.tensors, weights.lora)
        size_bytes = WeightsCopy(weights.lora, active.tensors).size_bytes
        return Version(weights.lora, active, size_bytes, file, is_apart=self._is_apart(active))

    def add(self, name: str, version: Version) -> None:
        """Register a version; an existing name keeps its weights. Call `spill` afterwards."""
        with self._lock:
            if name not in self._names:
                self._names[name] = version
                self._by_use[version] = None

    def pop(self, name: str) -> Version | None:
        """Remove a name and return its version, whose reference the caller must release."""
        with self._lock:
            return self._names.pop(name, None)

    def acquire(self, name: str) -> Version:
        """Return a version with a new reference, which the caller must release.

        Raises:
            NotFound: the name is unknown.
        """
        with self._lock:
            if name not in self._names:
                raise NotFound(
                    f"sampling session {name!r} not found: it was deleted, or its weights were"
                    " only in a session head that has stopped; save the weights again"
                )
            version = self._names[name]
            version.users += 1
            return version

    def release(self, version: Version) -> bool:
        """Release a reference; return whether it was the last one and the weights are freed."""
        with self._lock:
            version.users -= 1
            if version.users:
                return False
            del self._by_use[version]
        _delete(version.file)
        return True

    def weights(self, version: Version) -> ActiveWeights | None:
        """Return a version's weights, reading them back if they were spilled.

        Raises:
            OSError: the file can't be read, or is damaged, or spilling another version failed.
        """
        with self._lock:
            self._by_use.move_to_end(version)
            if version.in_memory is not None or not version.is_written:
                return version.in_memory
        active = self._active(_read(version), version.lora)
        with self._lock:
            version.in_memory = active
        self.spill()
        return active

    def export(self, version: Version) -> WeightsCopy | None:
        """Return the weights of a version. Spilled weights stay spilled.

        Raises:
            OSError: the file can't be read, or is damaged.
        """
        with self._lock:
            active = version.in_memory
            if active is None and not version.is_written:
                return None
        tensors = _read(version) if active is None else active.tensors
        return WeightsCopy(version.lora, tensors)

    def spill(self) -> None:
        """Write the least recently used weights to files until the rest fits in memory.

        The most recently used version always stays in memory.

        Raises:
            OSError: a file can't be written; its weights stay in memory.
        """
        while (version := self._next_to_spill()) is not None:
            try:
                self._write(version)
            except BaseException:
                _delete(version.file)
                raise
            finally:
                with self._lock:
                    version.is_spilling = False
                    is_gone = not version.users
            if is_gone:
                _delete(version.file)

    def _next_to_spill(self) -> Version | None:
        with self._lock:
            held = [v for v in self._by_use if v.in_memory is not None and not v.is_spilling]
            size_bytes = sum(version.size_bytes for version in held)
            if len(held) < 2 or size_bytes <= self._max_bytes:
                return None
            held[0].is_spilling = True
            return held[0]

    def _write(self, version: Version) -> None:
        active = version.in_memory
        if active is not None and not version.is_written:
            self._scratch_dir.mkdir(parents=True, exist_ok=True)
            save_file(dict(active.tensors), version.file)
            version.checksum = _checksum(version.file)
        with self._lock:
            version.in_memory, version.is_written = None, True

    def _active(self, tensors: Mapping[str, Tensor], config: LoraConfig | None) -> ActiveWeights:
        dtype = self._dtype if config is None else torch.float32
        there = {name: tensor.to(self._device, dtype) for name, tensor in tensors.items()}
        return ActiveWeights(there, adapters.scale(config.rank) if config else None)

    def _is_apart(self, active: ActiveWeights) -> bool:
        # In float32 each adapter has its own product.
        is_adapter = active.lora_scale is not None and self._dtype != torch.float32
        return is_adapter and not can_share_batch(active.tensors.values())


def _read(version: Version) -> dict[str, Tensor]:
    """Return spilled weights.

    Raises:
        OSError: the file can't be read, or is not what was written.
    """
    if _checksum(version.file) != version.checksum:
        raise OSError(
            f"the file {version.file} with the weights of a sampler is damaged; save them again"
        )
    return load_file(version.file)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as content:
        while part := content.read(_PART_BYTES):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _delete(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning(
            "can't delete a file of sampler weights", extra={"file": str(file), "error": str(error)}
        )
