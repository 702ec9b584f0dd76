"""What every part measures with: the device, its clock and its memory."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.gpu.workloads import Workload

T = TypeVar("T")

SGLANG_PYTHON = "TINKERCLOUD_BENCHMARK_SGLANG_PYTHON"
"""Variable with a Python that has SGLang, and the packages it wants; by default it is this one."""

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L4": 121e12}
"""Dense bfloat16 operations a second, from the makers' data sheets."""


class Skipped(Exception):
    """A figure that can't be measured here; the message says why."""


@dataclass(frozen=True)
class Bench:
    """A device, and the sizes to measure on it."""

    device: torch.device
    work: Workload

    @property
    def dtype(self) -> torch.dtype:
        """Of base weights where speed is measured."""
        return torch.bfloat16

    @property
    def name(self) -> str:
        """What the device calls itself."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return self.device.type

    @property
    def peak_flops(self) -> float | None:
        """Operations a second that it is sold with; None if it is not one of the known."""
        return next((flops for kind, flops in _PEAK_FLOPS.items() if kind in self.name), None)

    def finish(self) -> None:
        """Wait until everything that was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, *works: Callable[[], object], rounds: int | None = None) -> list[float]:
        """Return the median seconds of each piece of work; they take turns."""
        for work in works:
            work()
        return self._medians(works, rounds or self.work.rounds)

    def first_seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of work that is too long to be done twice."""
        return self._medians([work], 1)[0]

    def _medians(self, works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
        taken: list[list[float]] = [[] for _ in works]
        for _ in range(rounds):
            for times, work in zip(taken, works, strict=True):
                self.finish()
                start = time.perf_counter()
                work()
                self.finish()
                times.append(time.perf_counter() - start)
        return [statistics.median(times) for times in taken]

    def peak_bytes(self, work: Callable[[], T]) -> tuple[int, T]:
        """Return what a piece of work needs at most beyond what is held already, and its result.

        Raises:
            Skipped: the device does not count its memory.
        """
        if self.device.type != "cuda":
            raise Skipped(f"memory: {self.device.type} does not count what its tensors take")
        self.finish()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = work()
        self.finish()
        return torch.cuda.max_memory_allocated(self.device) - before, result

    def tidy(self) -> None:
        """Give back memory that nobody holds."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def largest(self, sizes: Sequence[int], work: Callable[[int], T]) -> tuple[int, T]:
        """Return the first of the sizes for which there is enough memory, and what came of it.

        Raises:
            Skipped: there is not enough for any.
        """
        for size in sizes:
            with suppress(torch.OutOfMemoryError):
                return size, work(size)
            # Only here, where nothing holds the error, is what its frames held given back.
            self.tidy()
        raise Skipped(f"memory: {self.name} has too little for {list(sizes)}")
