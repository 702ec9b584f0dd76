"""How a model is plan_parallelism over trainers, where its BaseModel leaves that to the operator: pure."""

import json
from dataclasses import dataclass

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.shapes import Planning, TrainerShape
from tinkercloud_planning import families
from tinkercloud_planning.architecture import Architecture
from tinkercloud_planning.gpus import Fleet, Gpu, gpu
from tinkercloud_planning.plan import TrainerPlan, plan_trainer
from tinkercloud_planning.refusal import engine_refusal
from tinkercloud_planning.search import Demand, Engine, can_sample


@dataclass(frozen=True, slots=True)
class _PlanningInput:
    """What is known of what is planned for."""

    model: Architecture
    gpu: Gpu


def plan_parallelism(
    trainer: TrainerShape, sequence_length: int, lora_rank: int | None, beside: Engine | None
) -> TrainerPlan:
    """Return how a model is plan_parallelism.

    Args:
        trainer: with `planning`.
        sequence_length: tokens of the longest sequence.
        lora_rank: of the adapter; None if the whole model is trained.
        beside: the engine that shares the trainers' GPUs, if one does.

    Raises:
        DoesNotFit: no way fits.
        ValueError: nothing can be planned for any session, see `planning_problem`.
    """
    assert trainer.planning is not None  # noqa: S101 - nobody asks for another
    known, pods = _read(trainer.planning, sequence_length), trainer.gpus_per_replica
    demand = Demand(known.model, sequence_length, lora_rank)
    fleet = Fleet(known.gpu, trainer.replicas * pods, per_node=pods)
    return plan_trainer(demand, fleet, beside=beside)


def check_engine(planning: Planning, sequence_length: int, lora_rank: int, gpus: int) -> None:
    """Check that an engine with GPUs of its own holds the model.

    Args:
        planning: what is known of the model, and of all GPUs.
        sequence_length: tokens of the longest sequence.
        lora_rank: the largest of the adapters that it has slots for.
        gpus: how many it spans.

    Raises:
        DoesNotFit: it does not.
        ValueError: nothing is known, see `planning_problem`.
    """
    known = _read(planning, sequence_length)
    demand = Demand(known.model, sequence_length, lora_rank)
    if not can_sample(demand, known.gpu, gpus):
        raise engine_refusal(demand, known.gpu, gpus)


def planning_problem(base_model: BaseModelSpec) -> str | None:
    """Return why nothing can be planned for any session of a BaseModel; None if it can."""
    planning = base_model.trainer.planning
    if planning is None:
        return None
    try:
        _read(planning, base_model.max_context_length)
    except ValueError as error:
        return f"trainer.planning: {error}"
    return None


def _read(planning: Planning, sequence_length: int) -> _PlanningInput:
    try:
        config = json.loads(planning.config)
    except RecursionError:
        raise ValueError("config: lists or objects are nested too deeply") from None
    if not isinstance(config, dict):
        raise ValueError("config: expected the JSON object of a config.json")  # noqa: TRY004 - text
    kind = gpu(planning.gpu)
    described = families.read(config)
    if described.only_torch:
        raise ValueError(
            f"config: the megatron trainer does not support {described.only_torch}; set"
            " trainer.backend to torch and omit trainer.planning"
        )
    if sequence_length > described.max_context_length:
        raise ValueError(
            f"config: the BaseModel's maxContextLength is {sequence_length}, but this model supports"
            f" at most {described.max_context_length} tokens (max_position_embeddings); lower"
            " maxContextLength"
        )
    return _PlanningInput(described, kind)
