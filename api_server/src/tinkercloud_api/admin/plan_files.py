"""Input and output of `tinkercloud plan`; the planner itself is `tinkercloud_planning`."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from pydantic import TypeAdapter, ValidationError
from rich.console import RenderableType
from rich.table import Table

from tinkercloud_api.providers.model_arguments import unknown_model
from tinkercloud_crds import labels
from tinkercloud_crds.base_model import ModelName
from tinkercloud_planning import families
from tinkercloud_planning.architecture import Architecture, UnknownArchitecture
from tinkercloud_planning.gpus import UnknownGpus, parse
from tinkercloud_planning.memory import GpuMemory
from tinkercloud_planning.plan import ModelPlan, plan_training
from tinkercloud_planning.plan import plan as make_plan
from tinkercloud_planning.refusal import DoesNotFit, gib, most_sessions
from tinkercloud_planning.search import Demand
from tinkercloud_planning.serving import ServingPlan, plan_serving

_DEFAULT_SEQUENCE_LENGTH = 32768
_CONFIG = "config.json"
_MIRROR = "/hf"
"""Path under which a server has the tokenizers of its models, as HF_ENDPOINT of its clients."""
_HEAD_IMAGE = "tinkercloud-worker"
_MODELS_CLAIM = "models"
_PACKAGE = "tinkercloud-api"
_FOR_GPUS = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
"""Toleration of the usual taint of GPU nodes. Inference engines that share GPUs with trainers do
not request them as a resource, so Kubernetes does not add this toleration to their pods."""


class CannotPlan(Exception):
    """No plan is possible; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is planned for, as the command's options say it."""

    gpus: str
    """Number and kind of GPUs, such as `8xH100`; see `gpus.parse`."""
    gpus_per_node: int = 8
    sequence_length: int | None = None
    """Longest sequence, in tokens; None means the model's own limit, at most 32768."""
    lora_rank: int | None = 32
    """Largest LoRA rank; None for full fine-tuning."""
    pool_slots: int = 1
    """Runs on one cluster of a pool; 1 if each run has its own pods."""
    sessions: int = 1
    """Sessions that divide the GPUs."""

    def length(self, model: Architecture) -> int:
        """Return the longest sequence of a model, in tokens."""
        longest = min(_DEFAULT_SEQUENCE_LENGTH, model.max_context_length)
        return longest if self.sequence_length is None else self.sequence_length


def plan(model: str, wanted: Wanted) -> ModelPlan:
    """Plan the training and sampling of a model.

    Args:
        model: folder in Hugging Face format, or model id on the Hugging Face hub.
        wanted: what to plan for.

    Raises:
        CannotPlan: the model's configuration cannot be read, the kind of GPU is unknown, or the
            model does not fit.
    """
    return _planned(model, wanted, make_plan)


def training_only(model: str, wanted: Wanted) -> ModelPlan:
    """Plan the training of a model that external servers sample; see `plan`."""
    return _planned(model, wanted, plan_training)


def serving(model: str, wanted: Wanted) -> ServingPlan:
    """Plan the training and sampling of a model by `tinkercloud serve` on one GPU; see `plan`."""
    with _refusals(model):
        fleet = parse(wanted.gpus, wanted.gpus_per_node)
        if fleet.count > 1 or wanted.sessions > 1:
            raise UnknownGpus(
                f"GPUs {wanted.gpus!r}, sessions {wanted.sessions}: the process that `tinkercloud"
                f" serve` starts for a model uses one GPU, for all sessions; use 1x{fleet.gpu.name}"
                " without --sessions, or plan for Kubernetes, without --serve"
            )
        described = families.read(read_config(model))
        length, slots = wanted.length(described), wanted.pool_slots
        return plan_serving(Demand(described, length, wanted.lora_rank, slots), fleet.gpu)


def _planned(model: str, wanted: Wanted, planner: Callable[..., ModelPlan]) -> ModelPlan:
    with _refusals(model):
        # Before the configuration, which may have to be fetched.
        fleet = parse(wanted.gpus, wanted.gpus_per_node).share(wanted.sessions)
        described = families.read(read_config(model))
        return planner(
            described,
            fleet,
            sequence_length=wanted.length(described),
            lora_rank=wanted.lora_rank,
            slots=wanted.pool_slots,
        )


@contextmanager
def _refusals(model: str) -> Iterator[None]:
    try:
        yield
    except (UnknownArchitecture, UnknownGpus, DoesNotFit) as error:
        raise CannotPlan(f"{model}: {error}") from error


def read_config(model: str) -> dict[str, Any]:
    """Read a model's configuration from a folder, the local Hugging Face cache or the hub.

    Raises:
        CannotPlan: the configuration is in none of them, or is not a JSON object.
    """
    folder = Path(model).expanduser()
    path = folder / _CONFIG if folder.is_dir() else _from_hub(model)
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CannotPlan(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CannotPlan(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _from_hub(model: str) -> Path:
    # It would log each of its attempts, which the error sums up.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        with suppress(LocalEntryNotFoundError):
            return Path(hf_hub_download(model, _CONFIG, local_files_only=True))
        # A single attempt: without a network, the download would try six times.
        get_hf_file_metadata(hf_hub_url(model, _CONFIG))
        return Path(hf_hub_download(model, _CONFIG))
    except HFValidationError:
        raise CannotPlan(unknown_model(model)) from None
    except httpx2.TransportError as error:
        raise CannotPlan(
            f"{model!r} is neither a local folder nor in the local Hugging Face cache, and the hub"
            f" at {constants.ENDPOINT} cannot be reached ({error}). One small file is sufficient:"
            f" download {hf_hub_url(model, _CONFIG)} elsewhere, put it in a folder as {_CONFIG},"
            " and pass that folder; or set HF_ENDPOINT to a mirror"
        ) from error
    except OSError as error:
        reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
        remedy = "set HF_TOKEN for a gated model"
        if constants.ENDPOINT.endswith(_MIRROR):
            remedy = (
                "unset HF_ENDPOINT, which names a Tinkercloud server: it has only its own models"
            )
        raise CannotPlan(
            f"{model!r} is neither a local folder nor in the local Hugging Face cache, and its"
            f" {_CONFIG} cannot be downloaded from {constants.ENDPOINT} ({reason}); pass a folder"
            f" that contains it, or {remedy}"
        ) from error


def manifest(plan: ModelPlan | ServingPlan, model: str) -> dict[str, Any]:
    """Return what `--json` prints: a BaseModel, or the environment variables of a server."""
    return plan.settings() if isinstance(plan, ServingPlan) else base_model(plan, model)


def base_model(plan: ModelPlan, model: str) -> dict[str, Any]:
    """Return the manifest of a BaseModel that implements a plan.

    Args:
        plan: plan of the model.
        model: as passed to `plan`. A local folder becomes a folder of the same name on a volume.

    Raises:
        CannotPlan: the name is not valid as the model name of a BaseModel.
    """
    path = Path(model).expanduser()
    name, source = model, dict[str, Any](hub=model)
    if path.is_dir():
        name = path.resolve().name
        source = {"volume": {"claimName": _MODELS_CLAIM, "path": name}}
    if not _is_model_name(name):
        raise CannotPlan(
            f"spec.modelName: {name!r} is not a valid model name; it must have 1 to 200 of the"
            " characters A-Z a-z 0-9 . _ - and start with a letter or digit. Rename the model's"
            " folder"
        )
    spec = plan.spec()
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "BaseModel",
        "metadata": {"name": _object_name(name)},
        "spec": {
            "modelName": name,
            "source": source,
            **spec,
            "head": {"image": f"{_HEAD_IMAGE}:{version(_PACKAGE)}", **spec["head"]},
            "placement": {"tolerations": [_FOR_GPUS]},
        },
    }


def _is_model_name(name: str) -> bool:
    try:
        TypeAdapter(ModelName).validate_python(name)
    except ValidationError:
        return False
    return True


def _object_name(model: str) -> str:
    """Return the last part of a model's name as a valid Kubernetes object name."""
    return re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-")[:63].rstrip("-")


def report(
    plan: ModelPlan | ServingPlan, wanted: Wanted, gpu_price: float | None
) -> Iterator[RenderableType]:
    """Yield the parts of a plan's human-readable report.

    Args:
        plan: the plan of one session, or of a server.
        wanted: what was planned for.
        gpu_price: price of a GPU per hour, in any currency; None if unknown.
    """
    demand = plan.demand
    trained = "full fine-tuning" if demand.lora_rank is None else f"LoRA rank {demand.lora_rank}"
    gpus = f"1x{plan.gpu.name}" if isinstance(plan, ServingPlan) else str(plan.fleet)
    each = f" for each of {wanted.sessions} sessions" if wanted.sessions > 1 else ""
    yield (
        f"{demand.architecture.parameters / 1e9:.2f}B parameters on {gpus}{each}, sequences of"
        f" {demand.sequence_length} tokens, {trained}\n"
    )
    if isinstance(plan, ServingPlan):
        yield from _settings(plan)
        used, kind, memories = 1, plan.gpu, {"training and sampling": plan.memory}
    else:
        yield _choices(plan, wanted)
        used, kind = plan.fleet.count * wanted.sessions, plan.fleet.gpu
        memories = {"training": plan.division.trainer.memory}
        if plan.division.sampler:
            memories["sampling"] = plan.division.sampler.memory
    if gpu_price is not None:
        gpus = "1 GPU" if used == 1 else f"{used} GPUs"
        yield f"\nprice: {gpu_price * used:.2f} an hour, for {gpus} at {gpu_price:.2f}"
    yield f"\nestimated peak memory of the most loaded GPU, out of {gib(kind.memory)}:\n"
    yield _memory(memories)


def _settings(plan: ServingPlan) -> Iterator[str]:
    yield "One process trains and samples, and both share one copy of the model. Its settings:\n"
    for name, value in plan.settings().items():
        yield f"export {name}={value}"


def _choices(plan: ModelPlan, wanted: Wanted) -> Table:
    table = Table("choice", "value", "why", box=None)
    for reason in plan.reasons:
        table.add_row(reason.choice, reason.value, reason.why)
    # A pool shares one cluster, whose GPUs do not grow with its runs.
    is_alone = plan.division.sampler is not None and plan.demand.slots == 1
    found = most_sessions(plan.demand, plan.fleet) if is_alone else None
    if found is not None and found[0] > 1:
        sessions, each = wanted.sessions * found[0], replace(plan.fleet, count=found[1])
        why = f"{each} are enough for one; --sessions {sessions} plans that"
        table.add_row("sessions", f"{wanted.sessions} at a time", why)
    return table


def _memory(memories: Mapping[str, GpuMemory]) -> Table:
    table = Table("", *memories, box=None)
    parts = [dict(memory.parts()) for memory in memories.values()]
    for name in parts[0]:
        sizes = [part[name] for part in parts]
        if any(sizes):
            table.add_row(name.replace("_", " "), *map(gib, sizes))
    table.add_row("total", *(gib(memory.total) for memory in memories.values()))
    return table
