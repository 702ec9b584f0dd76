"""Published weights by name: in memory while in use, in the scratch folder when memory is short.

Reinforcement learning publishes a version after every step and keeps using the last one or two,
but any of them may be sampled from again.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from tinkercloud_protocol.errors import NotFound
from tinkercloud_worker import lora
from tinkercloud_worker.base_model import ActiveWeights
from tinkercloud_worker.engine.trainer import WeightsSnapshot


@dataclass(frozen=True, slots=True, eq=False)
class _Version:
    lora_scale: float | None
    in_memory: ActiveWeights | None
    size_bytes: int


class Versions:
    """Names to weights. Not thread-safe."""

    def __init__(self, scratch_dir: Path, max_bytes: int) -> None:
        self._scratch_dir = scratch_dir
        self._max_bytes = max_bytes
        self._versions: OrderedDict[str, _Version | None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._versions

    def add(self, name: str, weights: WeightsSnapshot | None) -> None:
        """Publish weights; None means the base model's own. A known name keeps its weights."""
        if name in self._versions:
            return
        if weights is None:
            self._versions[name] = None
            return
        scale = lora.scale(weights.lora.rank) if weights.lora else None
        active = ActiveWeights(weights.tensors, scale)
        self._versions[name] = _Version(scale, active, weights.size_bytes)
        self._spill(keep=name)

    def remove(self, name: str) -> None:
        """Forget a version and its file."""
        if self._versions.pop(name, None) is not None:
            self._file(name).unlink(missing_ok=True)

    def get(self, name: str) -> ActiveWeights | None:
        """Return a version's weights, reading them back if they were spilled.

        Raises:
            NotFound: the version is unknown.
        """
        if name not in self._versions:
            raise NotFound(
                f"sampling session {name!r} is unknown here: it was deleted, or its weights lived"
                " only in a head that has stopped; save the weights again"
            )
        self._versions.move_to_end(name)
        version = self._versions[name]
        if version is None:
            return None
        if version.in_memory is None:
            active = ActiveWeights(load_file(self._file(name)), version.lora_scale)
            version = _Version(version.lora_scale, active, version.size_bytes)
            self._versions[name] = version
            self._spill(keep=name)
        return version.in_memory

    def _spill(self, keep: str) -> None:
        held = [(n, v) for n, v in self._versions.items() if v is not None and v.in_memory]
        excess = sum(version.size_bytes for _, version in held) - self._max_bytes
        for name, version in held:
            if excess <= 0:
                return
            if name != keep and version.in_memory is not None:
                if not self._file(name).exists():
                    self._scratch_dir.mkdir(parents=True, exist_ok=True)
                    save_file(dict(version.in_memory.tensors), self._file(name))
                self._versions[name] = _Version(version.lora_scale, None, version.size_bytes)
                excess -= version.size_bytes

    def _file(self, name: str) -> Path:
        return self._scratch_dir / (re.sub(r"[^0-9A-Za-z-]", "_", name) + ".safetensors")
