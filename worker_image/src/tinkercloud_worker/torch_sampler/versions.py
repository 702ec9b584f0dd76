"""Published weights by name: in memory while in use, in the scratch folder when memory is short.

Reinforcement learning publishes a version after every step and keeps using the last one or two,
but any of them may be sampled from again.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkercloud_protocol.errors import NotFound
from tinkercloud_protocol.training import LoraConfig
from tinkercloud_worker import lora
from tinkercloud_worker.engine.trainer import WeightsSnapshot
from tinkercloud_worker.routes import ActiveWeights


@dataclass(frozen=True, slots=True, eq=False)
class _Version:
    lora: LoraConfig | None
    in_memory: ActiveWeights | None
    size_bytes: int


class Versions:
    """Names to weights. Not thread-safe."""

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
        active = self._active(weights.tensors, weights.lora)
        kept = WeightsSnapshot(weights.lora, active.tensors)
        self._versions[name] = _Version(weights.lora, active, kept.size_bytes)
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
        version = self._known(name)
        self._versions.move_to_end(name)
        if version is None:
            return None
        if version.in_memory is None:
            active = self._active(load_file(self._file(name)), version.lora)
            version = replace(version, in_memory=active)
            self._versions[name] = version
            self._spill(keep=name)
        return version.in_memory

    def export(self, name: str) -> WeightsSnapshot | None:
        """Return what is sampled from. Spilled weights stay spilled.

        Raises:
            NotFound: the version is unknown.
        """
        version = self._known(name)
        if version is None:
            return None
        active = version.in_memory
        tensors = load_file(self._file(name)) if active is None else active.tensors
        return WeightsSnapshot(version.lora, {key: t.float() for key, t in tensors.items()})

    def _active(self, tensors: Mapping[str, Tensor], config: LoraConfig | None) -> ActiveWeights:
        dtype = self._dtype if config is None else torch.float32
        there = {name: tensor.to(self._device, dtype) for name, tensor in tensors.items()}
        return ActiveWeights(there, lora.scale(config.rank) if config else None)

    def _known(self, name: str) -> _Version | None:
        if name not in self._versions:
            raise NotFound(
                f"sampling session {name!r} is unknown here: it was deleted, or its weights lived"
                " only in a head that has stopped; save the weights again"
            )
        return self._versions[name]

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
                self._versions[name] = replace(version, in_memory=None)
                excess -= version.size_bytes

    def _file(self, name: str) -> Path:
        return self._scratch_dir / (re.sub(r"[^0-9A-Za-z-]", "_", name) + ".safetensors")
