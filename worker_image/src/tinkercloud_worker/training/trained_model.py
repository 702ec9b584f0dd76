"""One model under training as flat vectors, with its AdamW state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker.engine.memory_report import BYTES_PER_PARAMETER
from tinkercloud_worker.engine.ranks import Sharding
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.lora.parameters import Trainable

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, under torch's names."""

T = TypeVar("T")


class PendingCopy(Generic[T]):
    """A copy that is made once, on the first thread that needs it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._lock = Lock()
        self._copy: T | None = None
        self._error: Exception | None = None

    def make(self) -> None:
        """Make the copy unless it was made; another thread that makes it is waited for."""
        with self._lock:
            if self._make is None:
                return
            try:
                self._copy = self._make()
            except Exception as error:  # noqa: BLE001 - who takes the copy gets it
                self._error = error
            self._make = None

    def take(self) -> T:
        """Return the copy, once.

        Raises:
            Exception: making it failed.
        """
        self.make()
        if self._error is not None:
            raise self._error
        copy, self._copy = self._copy, None
        assert copy is not None, "the copy was already taken"  # noqa: S101 - callers take it once
        return copy


@dataclass(slots=True, eq=False)
class TrainedModel:
    """One model under training."""

    lora: LoraConfig | None
    trainable: Trainable
    sharding: Sharding | None = None
    """How the model is sharded over ranks; None: the trainable is the full model, under its own
    names."""
    grad_norm: float | None = None
    """Norm of the summed gradient, where ranks have to compute it together."""
    copies: list[ref[PendingCopy[Any]]] = field(default_factory=list)
    """Copies of weights and moments that may not have been made yet."""
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Start with no moments and no steps."""
        self.optimizer = torch.optim.AdamW([self.trainable.flat], lr=0.0, fused=True)

    def copy_later(self, make: Callable[[], T]) -> "PendingCopy[T]":
        """Return a copy of weights and moments that is made by who needs it, or by `settle`."""
        copy = PendingCopy(make)
        self.copies = [ref(copy), *(each for each in self.copies if each() is not None)]
        return copy

    def settle(self) -> None:
        """Make all copies that are still needed. Call it before weights or moments change."""
        while self.copies:
            copy = self.copies.pop()()
            if copy is not None:
                copy.make()

    @property
    def unused_bytes(self) -> int:
        """Bytes that the model will allocate but may not have allocated yet.

        The system counts a page of zeros only after it is written.
        """
        flat = self.trainable.flat
        return 0 if self.optimizer.state[flat] else (BYTES_PER_PARAMETER - 4) * flat.numel()

    @property
    def held_bytes(self) -> int:
        """Bytes that the model takes on the device, and those that are kept free for it."""
        return sum(vector.nbytes for vector in self.vectors) + self.unused_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes that the model takes once it has moments."""
        return BYTES_PER_PARAMETER * self.trainable.flat.numel()

    @property
    def vectors(self) -> list[Tensor]:
        """All that the model has allocated: weights, gradient, and moments if it has any."""
        flat = self.trainable.flat
        moments = [value for value in self.optimizer.state.get(flat, {}).values() if value.dim()]
        return [flat.detach(), self.trainable.gradient, *moments]

    def begin_moments(self) -> None:
        """Allocate both moments at once: AdamW itself could leave a full GPU with only one."""
        flat = self.trainable.flat
        if not self.optimizer.state[flat]:
            moments = {moment: torch.zeros_like(self.trainable.gradient) for moment in MOMENTS}
            self.optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **moments}


def new_adapter(
    targets: Sequence[adapters.Target], config: LoraConfig, device: torch.device | None = None
) -> TrainedModel:
    """Return a new adapter for the targets that the configuration selects.

    Raises:
        InvalidRequest: the configuration selects no target.
    """
    selected = adapters.select(targets, config)
    trainable = Trainable(adapters.layout(selected, config.rank), device)
    seed = config.seed if config.seed is not None else torch.seed()
    for target in selected:
        a = adapters.initial_a(target, config.rank, seed)
        trainable.tensors[target.a_name].detach().copy_(a)
    return TrainedModel(config, trainable)
