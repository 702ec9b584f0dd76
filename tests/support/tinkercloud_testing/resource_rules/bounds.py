"""A value at each bound of the custom resources, and one beyond."""

from collections.abc import Callable, Mapping

from tinkercloud_testing.resource_rules.rule import base_model, session
from tinkercloud_testing.resources.sessions import ENGINES, PROGRAM, TRAINERS, Json

NIC: Json = {"name": "rdma/hca", "count": 1}


def variable(name: str, value: str = "1") -> Json:
    return {"environment": [{"name": name, "value": value}]}


AT_THE_BOUND: Mapping[str, tuple[Callable[..., Json], Json, Json]] = {
    "spec.modelName": (base_model, {"modelName": "m" * 200}, {"modelName": "m" * 201}),
    "spec.maxContextLength": (base_model, {"maxContextLength": 16}, {"maxContextLength": 15}),
    "spec.head.image": (base_model, {"head": {"image": "i" * 512}}, {"head": {"image": "i" * 513}}),
    "spec.limits.maxLoraRank": (
        base_model,
        {"limits": {"maxLoraRank": 1024}},
        {"limits": {"maxLoraRank": 1025}},
    ),
    "spec.source.uri": (
        base_model,
        {"source": {"uri": "s3://a"}},
        {"source": {"uri": "file:///etc"}},
    ),
    "spec.trainer.startTimeoutSeconds": (
        base_model,
        {"trainer": TRAINERS | {"startTimeoutSeconds": 1}},
        {"trainer": TRAINERS | {"startTimeoutSeconds": 0}},
    ),
    "spec.trainer.extendedResources": (
        base_model,
        {"trainer": TRAINERS | {"extendedResources": [NIC]}},
        {"trainer": TRAINERS | {"extendedResources": [NIC | {"name": "cpu"}]}},
    ),
    "spec.sampler.extendedResources": (
        base_model,
        {"trainer": TRAINERS, "sampler": ENGINES | {"extendedResources": [NIC]}},
        {"trainer": TRAINERS, "sampler": ENGINES | {"extendedResources": [NIC, NIC]}},
    ),
    "spec.trainer.environment": (
        base_model,
        {"trainer": TRAINERS | variable("NCCL_DEBUG")},
        {"trainer": TRAINERS | variable("LD_PRELOAD")},
    ),
    "spec.sampler.environment": (
        base_model,
        {"trainer": TRAINERS, "sampler": ENGINES | variable("NCCL_DEBUG", "~")},
        {"trainer": TRAINERS, "sampler": ENGINES | variable("NCCL_DEBUG", "$(RAY_AUTH_TOKEN)")},
    ),
    "spec.program.module": (
        session,
        {"program": PROGRAM | {"module": "a._b.c1"}},
        {"program": PROGRAM | {"module": "a; b"}},
    ),
    "spec.program.args": (
        session,
        {"program": PROGRAM | {"args": ["a" * 16384] * 32}},
        {"program": PROGRAM | {"args": ["a" * 16385]}},
    ),
    "spec.programs.images": (
        base_model,
        {"programs": {"images": ["a"]}},
        {"programs": {"images": []}},
    ),
    "spec.sharing": (base_model, {"sharing": "Shared"}, {"sharing": "Borrowed"}),
    "spec.pool.slotsPerCluster": (
        base_model,
        {"sharing": "Shared", "pool": {"slotsPerCluster": 1}},
        {"sharing": "Shared", "pool": {"slotsPerCluster": 0}},
    ),
    "spec.warmSpares": (base_model, {"warmSpares": 0}, {"warmSpares": -1}),
    "spec.pool.spareSlots": (
        base_model,
        {"sharing": "Shared", "pool": {"spareSlots": 0}},
        {"sharing": "Shared", "pool": {"spareSlots": -1}},
    ),
    "spec.sampler.engines.startTimeoutSeconds": (
        base_model,
        {"trainer": TRAINERS, "sampler": ENGINES | {"engines": {"startTimeoutSeconds": 1}}},
        {"trainer": TRAINERS, "sampler": ENGINES | {"engines": {"startTimeoutSeconds": 0}}},
    ),
    "spec.sampler.engines.processGroup": (
        base_model,
        {"trainer": TRAINERS, "sampler": ENGINES | {"engines": {"processGroup": "nccl"}}},
        {"trainer": TRAINERS, "sampler": ENGINES | {"engines": {"processGroup": "mpi"}}},
    ),
    "spec.placement.tolerations": (
        base_model,
        {"placement": {"tolerations": [{"operator": "Exists"}] * 16}},
        {"placement": {"tolerations": [{"operator": "Exists"}] * 17}},
    ),
    "spec.placement.topologyAffinity.enforcement": (
        base_model,
        {"placement": {"topologyAffinity": {"key": "rack", "enforcement": "Preferred"}}},
        {"placement": {"topologyAffinity": {"key": "rack", "enforcement": "Sometimes"}}},
    ),
    "spec.trainer.placement.topologyAffinity.key": (
        base_model,
        {"trainer": TRAINERS | {"placement": {"topologyAffinity": {"key": "k"}}}},
        {"trainer": TRAINERS | {"placement": {"topologyAffinity": {"key": ""}}}},
    ),
    "spec.sessions.startDeadlineSeconds": (
        base_model,
        {"sessions": {"startDeadlineSeconds": 60}},
        {"sessions": {"startDeadlineSeconds": 59}},
    ),
    "spec.sessions.queueNames": (
        base_model,
        {"sessions": {"queueNames": ["q"] * 64}},
        {"sessions": {"queueNames": ["q"] * 65}},
    ),
    "spec.head.resources.memory": (
        base_model,
        {"head": {"image": "i", "resources": {"memory": "1.5Gi"}}},
        {"head": {"image": "i", "resources": {"memory": "much"}}},
    ),
    "spec.owner": (session, {"owner": "o" * 128}, {"owner": "o" * 129}),
    "spec.lora.rank": (session, {"lora": {"rank": 1}}, {"lora": {"rank": 0}}),
    "spec.lora.seed": (session, {"lora": {"seed": 0}}, {"lora": {"seed": -1}}),
    "spec.modelId": (session, {"modelId": "s:train:10"}, {"modelId": "s:train:01"}),
    "spec.optimizer": (session, {"optimizer": "adamw"}, {"optimizer": "sgd"}),
    "spec.restoreFrom.path": (
        session,
        {"restoreFrom": {"path": "tinker://run:train:0/weights/a"}},
        {"restoreFrom": {"path": "tinker://run:train:0/weights/../a"}},
    ),
    "spec.trainer.replicas": (
        session,
        {"trainer": {"replicas": 512}},
        {"trainer": {"replicas": 513}},
    ),
    "spec.idle.timeoutSeconds": (
        session,
        {"idle": {"timeoutSeconds": 60}},
        {"idle": {"timeoutSeconds": 59}},
    ),
    "spec.idle.action": (session, {"idle": {"action": "Suspend"}}, {"idle": {"action": "Stop"}}),
    "spec.maxLifetimeSeconds": (
        session,
        {"maxLifetimeSeconds": 31_536_000},
        {"maxLifetimeSeconds": 31_536_001},
    ),
    "spec.ttlSecondsAfterFinished": (
        session,
        {"ttlSecondsAfterFinished": 0},
        {"ttlSecondsAfterFinished": -1},
    ),
}
"""The builder of the manifest, a value at the bound, and one beyond, by field."""
