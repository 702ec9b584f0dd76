"""Input and output of `tinkercloud plan`; the planner itself is `tinkercloud_planning`."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from pydantic import TypeAdapter, ValidationError
from rich.console import RenderableType
from rich.table import Table

from tinkercloud_api.providers.model_arguments import unknown_model
from tinkercloud_crds import labels
from tinkercloud_crds.base_model import ModelName
from tinkercloud_planning import architecture, families
from tinkercloud_planning.gpus import UnknownGpus, parse
from tinkercloud_planning.memory import GpuMemory
from tinkercloud_planning.plan import ModelPlan
from tinkercloud_planning.plan import plan as make_plan
from tinkercloud_planning.refusal import DoesNotFit, gib

_DEFAULT_SEQUENCE_LENGTH = 32768
_CONFIG = "config.json"
_HEAD_IMAGE = "tinkercloud-worker"
_MODELS_CLAIM = "models"
_PACKAGE = "tinkercloud-api"
_FOR_GPUS = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
"""Toleration of the usual taint of GPU nodes. Inference engines that share GPUs with trainers do
not request them as a resource, so Kubernetes does not add this toleration to their pods."""


class CannotPlan(Exception):
    """No plan is possible; the message says why and what to change."""


def plan(
    model: str,
    gpus: str,
    *,
    gpus_per_node: int,
    sequence_length: int | None,
    lora_rank: int | None,
    pool_slots: int,
) -> ModelPlan:
    """Plan the training and sampling of a model.

    Args:
        model: folder in Hugging Face format, or model id on the Hugging Face hub.
        gpus: number and kind of GPUs, such as `8xH100`; see `gpus.parse`.
        gpus_per_node: number of GPUs per node.
        sequence_length: longest sequence, in tokens; None means the model's own limit, at most
            32768.
        lora_rank: largest LoRA rank; None for full fine-tuning.
        pool_slots: runs on one cluster of a pool; 1 if each run has its own pods.

    Raises:
        CannotPlan: the model's configuration cannot be read, the kind of GPU is unknown, or the
            model does not fit.
    """
    try:
        described = families.read(read_config(model))
        longest = min(_DEFAULT_SEQUENCE_LENGTH, described.max_context_length)
        return make_plan(
            described,
            parse(gpus, gpus_per_node),
            sequence_length=longest if sequence_length is None else sequence_length,
            lora_rank=lora_rank,
            slots=pool_slots,
        )
    except (architecture.UnknownArchitecture, UnknownGpus, DoesNotFit) as error:
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
    with suppress(OSError, HFValidationError):
        return Path(hf_hub_download(model, _CONFIG, local_files_only=True))
    try:
        return Path(hf_hub_download(model, _CONFIG))
    except HFValidationError:
        raise CannotPlan(unknown_model(model)) from None
    except OSError as error:
        raise CannotPlan(
            f"{model!r} is neither a local folder nor in the local Hugging Face cache, and its"
            f" {_CONFIG} cannot be downloaded from the hub ({type(error).__name__}); pass a folder"
            " that contains it, or set HF_TOKEN for a gated model"
        ) from error


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


def report(plan: ModelPlan) -> Iterator[RenderableType]:
    """Yield the parts of a plan's human-readable report."""
    demand, division = plan.demand, plan.division
    trained = "full fine-tuning" if demand.lora_rank is None else f"LoRA rank {demand.lora_rank}"
    yield (
        f"{demand.architecture.parameters / 1e9:.2f}B parameters on {plan.fleet}, sequences of"
        f" {demand.sequence_length} tokens, {trained}\n"
    )
    choices = Table("choice", "value", "why", box=None)
    for reason in plan.reasons:
        choices.add_row(reason.choice, reason.value, reason.why)
    yield choices
    yield f"\nestimated peak memory of the most loaded GPU, out of {gib(plan.fleet.gpu.memory)}:\n"
    yield _memory(division.trainer.memory, division.sampler.memory)


def _memory(training: GpuMemory, sampling: GpuMemory) -> Table:
    table = Table("", "training", "sampling", box=None)
    for (name, trained), (_, sampled) in zip(training.parts(), sampling.parts(), strict=True):
        if trained or sampled:
            table.add_row(name.replace("_", " "), gib(trained), gib(sampled))
    table.add_row("total", gib(training.total), gib(sampling.total))
    return table
