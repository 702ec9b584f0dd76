"""Finds mistakes in the settings before a server says that it serves.

Everything here takes less than a second: of weights only the headers are read. What only loading a
model can show is reported by its session head.
"""

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from obstore.exceptions import BaseError

from tinkercloud_api.admin.listening import PortTakenError, bind
from tinkercloud_api.config.readable import binary_size
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.head_progress import weight_bytes
from tinkercloud_api.providers.local.head_folder import is_running
from tinkercloud_protocol.heads.object_store import open_store

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_FAMILIES = Path("models", "auto", "modeling_auto.py")
"""Where transformers lists the families of its models."""
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""Device files of GPUs: NVIDIA's, those of WSL, and AMD's."""
_CGROUP = Path("/sys/fs/cgroup")
_OF_HEADS = ("tinkercloud_worker", "torch", "transformers")
_OF_MEGATRON = ("megatron", "mbridge", "einops")
"""What heads and their megatron trainer import."""


class CannotServeError(Exception):
    """The settings can't work on this machine; the message names the setting and what to do."""


def check(settings: Settings, folders: Mapping[str, str]) -> None:
    """Check what a server needs before it starts.

    Args:
        settings: the settings.
        folders: folder of each model to serve on this machine, by its name.

    Raises:
        CannotServeError: a setting can't work.
    """
    _check_store(settings)
    if settings.provider == "local":
        check_models(settings, folders)


def check_models(settings: Settings, folders: Mapping[str, str]) -> None:
    """Check what this machine needs to serve models, in addition to those that it serves.

    Args:
        settings: the settings.
        folders: folder of each model, by its name.

    Raises:
        CannotServeError: one can't be served, or a setting can't work.
    """
    if folders:
        check_installed(settings)
    check_device(settings)
    # Heads that neither train nor sample themselves can serve a folder without weights.
    is_needed = settings.trainer.backend != "none" or settings.sampler.backend == "torch"
    for name, folder in folders.items():
        if is_needed or _has_weights(Path(folder)):
            check_weights(name, Path(folder))
        if is_needed:
            check_family(name, Path(folder))
    if loads_weights(settings):
        # The heads of a killed server have their weights in memory already.
        new = [at for name, at in folders.items() if not is_running(settings.state_dir, name)]
        check_memory(settings, sum(weight_bytes(Path(folder)) for folder in new))


def loads_weights(settings: Settings) -> bool:
    """Whether heads themselves load the weights of their models, into memory or onto a GPU."""
    trains = settings.trainer.backend != "none" and not settings.trainer.ranks
    return trains or settings.sampler.backend == "torch"


def check_installed(settings: Settings) -> None:
    """Check that the packages of session heads are installed in this environment.

    Raises:
        CannotServeError: some are not; the message says how to install them.
    """
    if missing := _missing(_OF_HEADS):
        raise CannotServeError(
            f"session heads: not installed: {missing}; install them with `pip install tinkercloud`"
        )
    if settings.trainer.backend == "megatron" and (missing := _missing(_OF_MEGATRON)):
        raise CannotServeError(
            f"trainer.backend: is 'megatron', but not installed: {missing}; install them with"
            " `pip install 'tinkercloud[megatron]'`, or set TINKERCLOUD_TRAINER__BACKEND=torch"
        )


def _missing(modules: Sequence[str]) -> str:
    return ", ".join(name for name in modules if importlib.util.find_spec(name) is None)


def _check_store(settings: Settings) -> None:
    try:
        open_store(settings.checkpoint_url)
    except (BaseError, OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CannotServeError(
            f"checkpoint_root: cannot open {settings.checkpoint_url!r} ({reason}); set it to a"
            " folder, or to a URL that starts with file:///, s3://, gs:// or az://"
        ) from None


def check_metrics_port(settings: Settings) -> None:
    """Check that the port for metrics is available.

    Raises:
        CannotServeError: it is not.
    """
    if settings.metrics_port is None:
        return
    try:
        bind(settings.host, settings.metrics_port, "TINKERCLOUD_METRICS_PORT").close()
    except PortTakenError as error:
        raise CannotServeError(f"metrics_port: {error}") from None


def has_gpu() -> bool:
    """Whether this machine has the device files of a GPU."""
    return any(Path(file).exists() for file in _GPU_FILES)


def check_device(settings: Settings) -> None:
    """Check that heads of this machine find the GPU that they are to use.

    Raises:
        CannotServeError: there is none.
    """
    device = settings.trainer.device
    if device == "cpu" or settings.trainer.ranks or settings.trainer.backend == "none":
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in {"", "-1"}:
        why = f"CUDA_VISIBLE_DEVICES is {hidden!r}"
    elif not has_gpu():
        why = f"none of {', '.join(_GPU_FILES)} exists"
    else:
        return
    raise CannotServeError(
        f"trainer.device: is {device!r}, but this machine has no GPU that torch can use ({why});"
        " install the driver, or set TINKERCLOUD_TRAINER__DEVICE=cpu"
    )


def check_weights(name: str, folder: Path) -> None:
    """Check that the weights of a model are there and complete, by their headers.

    Raises:
        CannotServeError: they are not.
    """
    try:
        for file in _weight_files(name, folder):
            if not file.is_file():
                raise CannotServeError(
                    f"model {name!r}: {file} is missing; download the model again, with its weights"
                )
            if file.suffix == ".safetensors" and (fault := _fault(file)) is not None:
                raise CannotServeError(f"model {name!r}: {file} {fault}; download it again")
    except OSError as error:
        raise CannotServeError(
            f"model {name!r}: cannot read {error.filename or folder} ({error.strerror}); allow the"
            " user of the server to read the model's folder and its files"
        ) from None


def check_family(name: str, folder: Path) -> None:
    """Check that transformers has the family of a model, without loading transformers.

    Raises:
        CannotServeError: it does not, or the model's configuration is damaged.
    """
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return
    known, config = Path(found.origin).parent / _FAMILIES, folder / "config.json"
    if not known.is_file() or not config.is_file():
        return
    try:
        family = json.loads(config.read_bytes()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise CannotServeError(
            f"model {name!r}: {config} is damaged ({error}); download it again"
        ) from None
    if f'"{family}"' not in known.read_text():
        raise CannotServeError(
            f"model {name!r}: {config} has model_type {family!r}, of which transformers"
            f" {metadata.version('transformers')} has no model; serve one of a family that it has"
        )


def check_memory(settings: Settings, needed: int) -> None:
    """Check that the weights of models fit into memory, if heads load them at once.

    Args:
        settings: the settings.
        needed: size of the weights, in bytes.

    Raises:
        CannotServeError: they do not fit.
    """
    free = available_bytes()
    if settings.trainer.device != "cpu" or not settings.preload or needed <= free:
        return
    raise CannotServeError(
        f"models: their weights have {binary_size(needed)}, and this machine has"
        f" {binary_size(free)} of memory free; serve fewer or smaller models"
    )


def available_bytes() -> int:
    """Return the memory, in bytes, that this machine and its control group have for programs."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, KeyError):
        kibibytes = _numbers(Path("/proc/meminfo"))
        free = (kibibytes["MemAvailable:"] + kibibytes["SwapFree:"]) << 10
    with contextlib.suppress(OSError, KeyError, ValueError):
        # File caches are counted as used, but are dropped when programs need memory.
        stat = _numbers(_CGROUP / "memory.stat")
        cached = stat["active_file"] + stat["inactive_file"]
        used = int((_CGROUP / "memory.current").read_text()) - cached
        free = min(free, int((_CGROUP / "memory.max").read_text()) - used)
    return free


def _numbers(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _weight_files(name: str, folder: Path) -> Iterator[Path]:
    # In the order in which heads select them.
    for file in map(folder.joinpath, (_INDEX, _SINGLE, _PICKLED, _PICKLED_INDEX)):
        if file.is_file():
            yield from _indexed(name, file) if file.suffix == ".json" else [file]
            return
    gguf = next(folder.glob("*.gguf"), None)
    hint = "download the model again, with its weights"
    if gguf is not None:
        hint = f"convert {gguf.name} with `python -m tinkercloud_worker.convert_gguf`"
    raise CannotServeError(
        f"model {name!r}: {folder} has no weights: neither {_SINGLE} nor {_INDEX} exists; {hint}"
    )


def _indexed(name: str, index: Path) -> Sequence[Path]:
    try:
        listed = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({index.with_name(Path(file).name) for file in listed})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotServeError(
            f"model {name!r}: {index} is damaged ({error}); download it again"
        ) from None


def _fault(file: Path) -> str | None:
    """Return what is wrong with a safetensors file, None for nothing."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 0 < length <= _LONGEST_HEADER:
            return "is not a safetensors file"
        header = opened.read(length)
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__"]
        expected = _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "is truncated or damaged: its header cannot be read"
    if size != expected:
        return f"has {size} bytes, but {expected} by its header: it is truncated or damaged"
    return None
