"""The checks of `tinkercloud doctor` of the machine: GPU, memory, disk, clock and packages."""

import asyncio
import contextlib
import ctypes
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from sqlalchemy import make_url, text
from sqlalchemy.exc import SQLAlchemyError

from tinkercloud_api.admin import preflight
from tinkercloud_api.catalog.schema.connection import open_database
from tinkercloud_api.config.readable import binary_size
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.head_progress import weight_bytes
from tinkercloud_api.providers.model_arguments import ModelNotFoundError, resolve
from tinkercloud_protocol.heads.releases import this_release

_SLOW_BYTES_PER_SECOND = 50e6
_SLOW_FLUSH_SECONDS = 0.1
_WRITTEN_BYTES = 32 << 20
_FLUSHES = 10
_SKEW_SECONDS = 5.0
_TIMEX_BYTES = 512
"""More than Linux' `struct timex` has."""
_UNSYNCHRONIZED = 5
"""TIME_ERROR of adjtimex."""
_OURS = ("api", "protocol", "worker", "planning", "crds", "kube", "programs")
_OTHERS = ("torch", "transformers", "safetensors", "ray", "tinker")
_STORES = {"s3": "https://s3.amazonaws.com", "gs": "https://storage.googleapis.com"}
_DESCRIBE_GPUS = """
import json, torch
names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
if not names:
    raise SystemExit(f"torch {torch.__version__} finds no GPU")
memory = [torch.cuda.mem_get_info(n) for n in range(len(names))]
torch.zeros(1, device="cuda").add_(1).item()
print(json.dumps({"names": names, "memory": memory, "torch": torch.__version__,
                  "cuda": torch.version.cuda or torch.version.hip}))
"""
"""Prints the GPUs; without one that works, it fails with the reason as its last line."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    check: str
    is_good: bool
    detail: str
    remedy: str = ""
    """What to do, if it is not part of the detail."""

    def as_row(self) -> dict[str, str]:
        """Return the result as a table row."""
        good = "warning" if self.remedy else "ok"
        result = good if self.is_good else "FAILED"
        detail = f"{self.detail}; {self.remedy}" if self.remedy else self.detail
        return {"check": self.check, "result": result, "detail": detail, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Gpus:
    """What torch says about the GPUs of this machine."""

    names: list[str]
    free: list[int]
    total: list[int]
    torch: str
    cuda: str

    @classmethod
    def parse(cls, line: str) -> "Gpus":
        """Read the line that `_DESCRIBE_GPUS` prints.

        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(line)
            free, total = zip(*found["memory"], strict=True)
            return cls(found["names"], [*free], [*total], found["torch"], str(found["cuda"]))
        except (KeyError, TypeError) as error:
            raise ValueError(line) from error

    def describe(self) -> str:
        """Return them in one line."""
        each = [
            f"{name}, {binary_size(free)} of {binary_size(total)} free"
            for name, free, total in zip(self.names, self.free, self.total, strict=True)
        ]
        return f"{'; '.join(each)}; torch {self.torch} for CUDA {self.cuda}, {_driver()}"


async def device(settings: Settings) -> list[CheckResult]:
    """Report whether torch finds the GPUs that heads use, and whether the models fit."""
    if not preflight.loads_weights(settings):
        detail = "heads compute elsewhere (trainer.ranks, or trainer.backend none)"
        return [CheckResult("device", is_good=True, detail=detail)]
    try:
        preflight.check_device(settings)
    except preflight.CannotServeError as error:
        return [CheckResult("device", is_good=False, detail=str(error))]
    if settings.trainer.device == "cpu":
        what = "it has GPUs: TINKERCLOUD_TRAINER__DEVICE=cuda uses them"
        if not preflight.has_gpu():
            what = "it has no GPU"
        detail = f"{os.cpu_count()} cores of this machine (trainer.device is cpu); {what}"
        return [CheckResult("device", is_good=True, detail=detail), _room(settings, None)]
    try:
        gpus = await _gpus()
    except ValueError as error:
        remedy = (
            "install a driver for the CUDA release of torch, or torch for the driver (`nvidia-smi`"
            " shows it), or set TINKERCLOUD_TRAINER__DEVICE=cpu"
        )
        return [CheckResult("device", is_good=False, detail=str(error), remedy=remedy)]
    return [CheckResult("device", is_good=True, detail=gpus.describe()), _room(settings, gpus)]


async def _gpus() -> Gpus:
    """Ask torch, in a process of its own, because that takes memory of the GPUs.

    Raises:
        ValueError: it finds none that works; the message says why.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", _DESCRIBE_GPUS),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    last = next(reversed(output.decode(errors="replace").splitlines()), "no output")
    if process.returncode != 0:
        raise ValueError(last)
    return Gpus.parse(last)


def _driver() -> str:
    with contextlib.suppress(OSError, StopIteration):
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
        return f"driver {next(each for each in words if each[0].isdigit())}"
    return "driver unknown"


def _room(settings: Settings, gpus: Gpus | None) -> CheckResult:
    """Compare the memory that is free with the weights that heads load into it.

    Args:
        settings: name the models; each has a head of its own, on the first GPU.
        gpus: the GPUs; None if heads compute on the CPU.
    """
    needed = 0
    for name, where in settings.models.items():
        with contextlib.suppress(ModelNotFoundError):
            needed += weight_bytes(Path(resolve(name, where).local_path or ""))
    free = preflight.available_bytes() if gpus is None else gpus.free[0]
    what = "memory" if gpus is None else "GPU memory"
    detail = f"{binary_size(free)} of {what} free; the weights have {binary_size(needed)}"
    is_running = any(settings.state_dir.glob("heads/*/head.json"))
    if is_running or needed <= free:
        return CheckResult("room for models", is_good=True, detail=detail)
    remedy = "serve fewer or smaller models, or end other programs that use this memory"
    return CheckResult("room for models", is_good=False, detail=detail, remedy=remedy)


def disk_speed(folder: Path) -> CheckResult:
    """Measure how fast a folder keeps data: journals are flushed before requests are confirmed."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            moment = time.perf_counter()
            file.write(os.urandom(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
            rate = _WRITTEN_BYTES / (time.perf_counter() - moment)
            moment = time.perf_counter()
            for _ in range(_FLUSHES):
                os.pwrite(file.fileno(), b"x" * 4096, 0)
                os.fsync(file.fileno())
            flush = (time.perf_counter() - moment) / _FLUSHES
    except OSError as error:
        remedy = "make room in the state folder, or make it writable"
        return CheckResult("disk speed", is_good=False, detail=str(error), remedy=remedy)
    detail = f"{rate / 1e6:.0f} MB/s, {flush * 1000:.1f} ms to flush 4 kB"
    if rate >= _SLOW_BYTES_PER_SECOND and flush <= _SLOW_FLUSH_SECONDS:
        return CheckResult("disk speed", is_good=True, detail=detail)
    remedy = "slow: put the state folder (TINKERCLOUD_STATE_DIR) on a local SSD"
    return CheckResult("disk speed", is_good=True, detail=detail, remedy=remedy)


async def clock(settings: Settings) -> list[CheckResult]:
    """Report whether NTP sets the clock, and compare it with those of catalog and store.

    Those that do not respond are left out: other checks report that.
    """
    clocks = {
        "the catalog's server": await _clock_of_catalog(settings.catalog_url),
        "the checkpoint store": await _clock_of_store(settings.checkpoint_url, os.environ),
    }
    found = [_kernel_clock()]
    for whose, difference in clocks.items():
        if difference is None:
            continue
        detail = f"{abs(difference):.1f} s from that of {whose}"
        remedy = ""
        if abs(difference) > _SKEW_SECONDS:
            remedy = "set both by NTP (`timedatectl set-ntp true`): stores refuse wrong clocks"
        found.append(CheckResult("clock", is_good=not remedy, detail=detail, remedy=remedy))
    return found


def _kernel_clock() -> CheckResult:
    """Report what the kernel says about this machine's clock."""
    try:
        # All zero, the argument changes nothing; the kernel fills it.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (AttributeError, OSError):
        state = -1
    if 0 <= state < _UNSYNCHRONIZED:
        return CheckResult("clock", is_good=True, detail="set by NTP, says the kernel")
    remedy = "check with `timedatectl` that something sets it: keys and URLs expire by it"
    detail = "the kernel does not know of NTP"
    return CheckResult("clock", is_good=True, detail=detail, remedy=remedy)


async def _clock_of_catalog(url: str) -> float | None:
    """Return by how many seconds the clock of a PostgreSQL server is ahead."""
    if make_url(url).get_backend_name() != "postgresql":
        return None
    engine = open_database(url)
    query = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
    try:
        async with engine.connect() as connection:
            before = time.time()
            there = float((await connection.execute(query)).scalar_one())
            return there - (before + time.time()) / 2
    except (SQLAlchemyError, OSError):
        return None
    finally:
        await engine.dispose()


async def _clock_of_store(url: str, environment: Mapping[str, str]) -> float | None:
    """Return by how many seconds the clock of an object store is ahead, to a second."""
    scheme = urlsplit(url).scheme
    address = _STORES.get(scheme)
    if scheme == "s3":
        named = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        address = named or environment.get("AWS_ENDPOINT") or address
    if address is None:
        return None
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(address) as answer:
            said = parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
        return None
    # The header has whole seconds, which are rounded down.
    return said + 0.5 - time.time()


def packages() -> CheckResult:
    """Report the versions of packages, and whether those of this project belong together."""
    ours = {name: _version(f"tinkercloud-{name}") for name in _OURS}
    release = this_release()
    others = [name for name, found in ours.items() if found not in {None, release}]
    shown = {name: version for name in _OTHERS if (version := _version(name)) is not None}
    versions: dict[str, Any] = {"tinkercloud": release, "Python": sys.version.split()[0], **shown}
    detail = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not others:
        return CheckResult("packages", is_good=True, detail=detail)
    wrong = ", ".join(f"tinkercloud-{name} is {ours[name]}" for name in others)
    remedy = f"install one release of all: `pip install --upgrade tinkercloud=={release}`"
    return CheckResult("packages", is_good=False, detail=f"{detail}; but {wrong}", remedy=remedy)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
