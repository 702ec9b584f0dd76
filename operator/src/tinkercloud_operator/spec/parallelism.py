"""Chooses the trainers' parallelism where a BaseModel leaves it to the operator: pure."""

import json

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.pods.shapes import Planning, TrainerShape
from tinkercloud_planning import families
from tinkercloud_planning.architecture import Architecture
from tinkercloud_planning.gpus import Fleet, Gpu, gpu
from tinkercloud_planning.plan import TrainerPlan, adapters_that_fit, plan_trainer
from tinkercloud_planning.refusal import engine_refusal
from tinkercloud_planning.search import Demand, Engine, can_sample


def plan_parallelism(
    trainer: TrainerShape, sequence_length: int, lora_rank: int | None, colocated: Engine | None
) -> TrainerPlan:
    """Return the plan of a model's trainers.

    Args:
        trainer: a shape with `planning`.
        sequence_length: tokens of the longest sequence.
        lora_rank: rank of the adapter; None for full fine-tuning.
        colocated: the engine that shares the trainers' GPUs, if there is one.

    Raises:
        DoesNotFit: no parallelism fits the GPUs.
        ValueError: no session can be planned; see `planning_problem`.
    """
    demand, fleet = _demand_and_fleet(trainer, sequence_length, lora_rank)
    return plan_trainer(demand, fleet, engine=colocated)


def plan_slots(
    trainer: TrainerShape, sequence_length: int, lora_rank: int, colocated: Engine | None
) -> int:
    """Return how many adapters of a rank the trainers hold at the same time.

    Args:
        trainer: a shape with `planning`.
        sequence_length: tokens of the longest sequence.
        lora_rank: rank of the adapters.
        colocated: the engine that shares the trainers' GPUs, if there is one.

    Raises:
        DoesNotFit: no parallelism fits the GPUs.
        ValueError: no session can be planned; see `planning_problem`.
    """
    demand, fleet = _demand_and_fleet(trainer, sequence_length, lora_rank)
    return adapters_that_fit(demand, fleet, engine=colocated, most_tokens=trainer.max_batch_tokens)


def _demand_and_fleet(
    trainer: TrainerShape, sequence_length: int, lora_rank: int | None
) -> tuple[Demand, Fleet]:
    assert trainer.planning is not None  # noqa: S101 - callers check it
    (model, kind), pods = _read(trainer.planning, sequence_length), trainer.gpus_per_replica
    demand = Demand(model, sequence_length, lora_rank)
    return demand, Fleet(kind, trainer.replicas * pods, per_node=pods)


def check_engine(planning: Planning, sequence_length: int, lora_rank: int, gpus: int) -> None:
    """Check that an engine with its own GPUs can hold the model.

    Args:
        planning: the description of the model and of all GPUs.
        sequence_length: tokens of the longest sequence.
        lora_rank: largest rank of the adapters that it has slots for.
        gpus: number of GPUs of the engine.

    Raises:
        DoesNotFit: the engine cannot hold the model.
        ValueError: no session can be planned; see `planning_problem`.
    """
    model, kind = _read(planning, sequence_length)
    demand = Demand(model, sequence_length, lora_rank)
    if not can_sample(demand, kind, gpus):
        raise engine_refusal(demand, kind, gpus)


def planning_problem(base_model: BaseModelSpec) -> str | None:
    """Return why no session of a BaseModel can be planned; None if sessions can."""
    planning = base_model.trainer.planning
    if planning is None:
        return None
    try:
        _read(planning, base_model.max_context_length)
    except ValueError as error:
        return f"trainer.planning: {error}"
    return None


def _read(planning: Planning, sequence_length: int) -> tuple[Architecture, Gpu]:
    """Return the model and the GPU that a plan is computed for."""
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
            f"config: the BaseModel's maxContextLength is {sequence_length}, but the model supports"
            f" at most {described.max_context_length} tokens (max_position_embeddings, extended by"
            " rope_scaling); lower maxContextLength"
        )
    return described, kind
