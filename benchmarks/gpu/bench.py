"""The device under test, with its clock and memory."""

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
"""Environment variable with the path of a Python that has SGLang; the default is this Python."""

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L4": 121e12}
"""Dense bfloat16 operations per second, from the vendors' data sheets."""


class Skipped(Exception):
    """A figure that can't be measured here; the message says why."""


@dataclass(frozen=True)
class Bench:
    """A device, and the sizes to measure on it."""

    device: torch.device
    work: Workload

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of base weights in speed benchmarks."""
        return torch.bfloat16

    @property
    def name(self) -> str:
        """The name of the device."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return self.device.type

    @property
    def peak_flops(self) -> float | None:
        """Its nominal operations per second; None if unknown."""
        return next((flops for kind, flops in _PEAK_FLOPS.items() if kind in self.name), None)

    def finish(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, *works: Callable[[], object], rounds: int | None = None) -> list[float]:
        """Return the median seconds of each piece of work; they take turns."""
        for work in works:
            work()
        return self._medians(works, rounds or self.work.rounds)

    def first_seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of work that is too long to repeat."""
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
        """Return the peak of additional memory of a piece of work, and its result.

        Raises:
            Skipped: the device has no memory statistics.
        """
        if self.device.type != "cuda":
            raise Skipped(f"memory: {self.device.type} has no memory statistics")
        self.finish()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = work()
        self.finish()
        return torch.cuda.max_memory_allocated(self.device) - before, result

    def tidy(self) -> None:
        """Release unused memory."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def largest(self, sizes: Sequence[int], work: Callable[[int], T]) -> tuple[int, T]:
        """Return the first size for which memory suffices, and the result.

        Raises:
            Skipped: memory suffices for none of them.
        """
        for size in sizes:
            with suppress(torch.OutOfMemoryError):
                return size, work(size)
            # Only here, after the error is gone, can the memory of its frames be released.
            self.tidy()
        raise Skipped(f"memory: {self.name} has too little memory for {list(sizes)}")
