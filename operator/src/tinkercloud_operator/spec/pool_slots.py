"""The number of sessions that a cluster of a pool serves if a BaseModel leaves it open: pure."""

import functools

from tinkercloud_crds.base_model import DEFAULT_SLOTS, BaseModelSpec, Pool
from tinkercloud_crds.pods.shapes import TrainerShape
from tinkercloud_operator.spec.parallelism import plan_slots
from tinkercloud_planning.refusal import DoesNotFit
from tinkercloud_planning.search import Engine

_MOST = 1000
"""Maximum that a BaseModel accepts."""


def pool_of(base_model: BaseModelSpec) -> Pool:
    """Return the pool of a BaseModel whose sessions share clusters, with its number of slots."""
    pool = base_model.pool or Pool()
    if pool.slots_per_cluster is not None:
        return pool
    sampler, rank = base_model.sampler, base_model.limits.max_lora_rank
    is_colocated = sampler.backend == "sglang" and sampler.colocated
    engine = Engine(max(1, sampler.gpus_per_replica), rank) if is_colocated else None
    slots = DEFAULT_SLOTS
    if base_model.trainer.planning is not None:
        # Where pods may run does not matter, and such a shape has no hash.
        shape = base_model.trainer.model_copy(update={"placement": None})
        slots = _slots(shape, base_model.max_context_length, rank, engine)
    return pool.model_copy(update={"slots_per_cluster": slots})


# Pools are reconciled often, and planning takes a while.
@functools.lru_cache(maxsize=256)
def _slots(
    trainer: TrainerShape, sequence_length: int, lora_rank: int, colocated: Engine | None
) -> int:
    """Return the planned number.

    If there is no plan, it is the default: the clusters themselves will report why.
    """
    try:
        return min(_MOST, plan_slots(trainer, sequence_length, lora_rank, colocated))
    except (DoesNotFit, ValueError):
        return DEFAULT_SLOTS
