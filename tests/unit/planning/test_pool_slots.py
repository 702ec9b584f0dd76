"""How many sessions a cluster of a pool serves if its BaseModel does not say."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_crds.base_model import DEFAULT_SLOTS, BaseModelSpec, Limits, Pool
from tinkercloud_crds.pods.placement import RolePlacement
from tinkercloud_operator.spec.pool_slots import pool_of
from tinkercloud_operator.spec.resolved import Rejection, ResolvedSpec, resolve
from tinkercloud_planning import families
from tinkercloud_planning.gpus import gpu
from tinkercloud_planning.layouts import Layout
from tinkercloud_planning.search import Demand
from tinkercloud_testing.resources.sessions import COLOCATED, SAMPLERS, a_base_model, a_session

MODELS = json.loads((Path(__file__).parent / "public_models.json").read_text())
MODEL, TOKENS, LENGTH = "Qwen/Qwen3-8B", 16384, 8192


def a_shared_model(rank: int = 32, pool: Pool | None = None, **fields: Any) -> BaseModelSpec:
    planning = {"gpu": "H100", "config": json.dumps(MODELS[MODEL]["config"])}
    trainer = {"backend": "megatron", "replicas": 1, "gpusPerReplica": 2, "planning": planning}
    shape = {"trainer": {**trainer, "maxBatchTokens": TOKENS}, "sampler": SAMPLERS, **fields}
    model = a_base_model(sharing="Shared", maxContextLength=LENGTH, **shape)
    return model.model_copy(update={"limits": Limits(max_lora_rank=rank), "pool": pool})


def memory_with(adapters: int, rank: int) -> int:
    """Return the bytes of a GPU that a step takes while it holds so many adapters."""
    architecture, kind = families.read(MODELS[MODEL]["config"]), gpu("H100")
    demand = Demand(architecture, LENGTH, rank)
    one = demand.training(Layout(data=2), TOKENS, reserve=kind.contexts(1), neighbour=0)
    return one.total + (adapters - 1) * one.trained


@pytest.mark.parametrize("rank", [8, 32, 128])
def test_the_planned_slots_fill_the_memory_of_a_gpu_and_no_more(rank: int) -> None:
    slots = pool_of(a_shared_model(rank)).slots

    assert slots > 1
    assert memory_with(slots, rank) <= gpu("H100").memory < memory_with(slots + 1, rank)


def test_a_number_that_is_given_is_used() -> None:
    assert pool_of(a_shared_model(pool=Pool(slots_per_cluster=3))).slots == 3


def test_where_the_trainers_run_does_not_change_the_number() -> None:
    placement = {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu"}]}
    planned = a_shared_model()
    placed = planned.trainer.model_copy(
        update={"placement": RolePlacement.model_validate(placement)}
    )

    assert pool_of(planned.model_copy(update={"trainer": placed})).slots == pool_of(planned).slots


def test_the_other_settings_of_the_pool_are_kept() -> None:
    pool = pool_of(a_shared_model(pool=Pool(max_clusters=7, spare_slots=2)))

    assert (pool.max_clusters, pool.spare_slots) == (7, 2)
    assert pool.slots > DEFAULT_SLOTS


def test_engines_on_the_trainers_gpus_leave_fewer_slots() -> None:
    sampler = {**COLOCATED, "gpusPerReplica": 2}

    assert pool_of(a_shared_model(sampler=sampler)).slots < pool_of(a_shared_model()).slots


@pytest.mark.parametrize(
    "planning", [None, {"gpu": "H100", "config": "[]"}], ids=["no planning", "an unknown model"]
)
def test_without_a_plan_the_number_is_the_default(planning: dict[str, str] | None) -> None:
    trainer = {"backend": "megatron", "replicas": 1, "gpusPerReplica": 2, "planning": planning}

    assert pool_of(a_shared_model(trainer=trainer)).slots == DEFAULT_SLOTS


def seconds_to_save(resolved: ResolvedSpec | Rejection) -> int:
    assert isinstance(resolved, ResolvedSpec)
    assert resolved.base_model.head.suspend_seconds is not None
    return resolved.base_model.head.suspend_seconds


def test_a_pool_cluster_gets_the_time_to_save_as_many_models_as_it_serves() -> None:
    planned = a_shared_model(rank=8)
    written = a_shared_model(rank=8, pool=pool_of(planned))

    for_all, as_written, for_one = map(
        seconds_to_save,
        (
            resolve(a_session(role="Pool"), planned, 0),
            resolve(a_session(role="Pool"), written, 0),
            resolve(a_session(), planned, 0),
        ),
    )
    assert for_all == as_written > for_one
