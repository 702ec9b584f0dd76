"""Published weights by name: in memory while in use, in the scratch folder when memory is short.

Reinforcement learning publishes a version after every step and keeps using the last one or two,
but any of them may be sampled from again. A version whose name is forgotten keeps its weights until
the last request that was taken in before has ended.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkercloud_protocol.errors import NotFound
from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_worker.engine.trainer import WeightsSnapshot
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.lora.segments import ActiveWeights

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Version:
    """Weights that were published. They are the same for as long as somebody needs them."""

    lora: LoraConfig | None
    in_memory: ActiveWeights | None
    """None: they were spilled, or are the base model's own."""
    size_bytes: int
    file: Path
    """Where they are spilled to."""
    is_written: bool = False
    is_spilling: bool = False
    users: int = 1
    """Its name, and requests, which need it."""


class Versions:
    """Names to weights. Any thread may call; nobody waits for a file that another needs."""

    def __init__(
        self,
        scratch_dir: Path,
        max_bytes: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make an empty collection.

        Args:
            scratch_dir: where weights are written that memory is too short for.
            max_bytes: of weights in memory.
            device: where weights are used; None means the CPU.
            dtype: that whole models are kept in, and used in: the base's.
        """
        self._scratch_dir = scratch_dir
        self._max_bytes = max_bytes
        self._device = device or torch.device("cpu")
        self._dtype = dtype
        self._lock = threading.Lock()
        self._names: dict[str, Version] = {}
        self._by_use: OrderedDict[Version, None] = OrderedDict()
        """Those that somebody needs, the least recently used first."""

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def prepare(self, weights: WeightsSnapshot | None) -> Version:
        """Return weights as they are sampled from, for `add`; None means the base model's own.

        It takes as long as copying them.
        """
        file = self._scratch_dir / f"{uuid4().hex}.safetensors"
        if weights is None:
            return Version(None, None, 0, file)
        active = self._active(weights.tensors, weights.lora)
        size_bytes = WeightsSnapshot(weights.lora, active.tensors).size_bytes
        return Version(weights.lora, active, size_bytes, file)

    def add(self, name: str, version: Version) -> None:
        """Name a version; a known name keeps its weights. `spill` should follow."""
        with self._lock:
            if name not in self._names:
                self._names[name] = version
                self._by_use[version] = None

    def pop(self, name: str) -> Version | None:
        """Forget a name. The caller then holds the version in its place, and must release it."""
        with self._lock:
            return self._names.pop(name, None)

    def acquire(self, name: str) -> Version:
        """Return a version, which keeps its weights until it is released as often.

        Raises:
            NotFound: the name is unknown.
        """
        with self._lock:
            if name not in self._names:
                raise NotFound(
                    f"sampling session {name!r} is unknown here: it was deleted, or its weights"
                    " lived only in a head that has stopped; save the weights again"
                )
            version = self._names[name]
            version.users += 1
            return version

    def release(self, version: Version) -> bool:
        """Release a version once; return whether nobody holds it now: then its weights are gone."""
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
            OSError: their file can't be read, or that of one that makes room can't be written.
        """
        with self._lock:
            self._by_use.move_to_end(version)
            if version.in_memory is not None or not version.is_written:
                return version.in_memory
        active = self._active(load_file(version.file), version.lora)
        with self._lock:
            version.in_memory = active
        self.spill()
        return active

    def export(self, version: Version) -> WeightsSnapshot | None:
        """Return what is sampled from. Spilled weights stay spilled.

        Raises:
            OSError: their file can't be read.
        """
        with self._lock:
            active = version.in_memory
            if active is None and not version.is_written:
                return None
        tensors = load_file(version.file) if active is None else active.tensors
        return WeightsSnapshot(version.lora, tensors)

    def spill(self) -> None:
        """Write weights to files, least recently used first, until the rest fit in memory.

        Those used last stay there, whatever their size.

        Raises:
            OSError: a file can't be written. Its weights stay in memory.
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
        with self._lock:
            version.in_memory, version.is_written = None, True

    def _active(self, tensors: Mapping[str, Tensor], config: LoraConfig | None) -> ActiveWeights:
        dtype = self._dtype if config is None else torch.float32
        there = {name: tensor.to(self._device, dtype) for name, tensor in tensors.items()}
        return ActiveWeights(there, adapters.scale(config.rank) if config else None)


def _delete(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning(
            "a file of sampler weights stays", extra={"file": str(file), "error": str(error)}
        )
