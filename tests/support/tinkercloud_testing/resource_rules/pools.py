"""BaseModels with pools, their clusters, and the sessions on them: cases for each rule."""

from tinkercloud_testing.resource_rules.rule import Rule, base_model, session
from tinkercloud_testing.resources.sessions import PROGRAM, Json

POOL: Json = {"role": "Pool", "lora": None}
SPARE: Json = {"role": "Spare", "lora": None}
SHARED: Json = {"sharing": "Shared"}
RUN: Json = {**SHARED, "modelId": "run:train:0"}
RESTORED = {"path": "tinker://run:train:0/weights/last"}


def pool(**fields: int) -> Json:
    return base_model(**SHARED, pool=fields)


POOL_RULES = (
    Rule(
        "spec",
        "warmSpares: only valid with sharing Dedicated; use pool.minClusters and pool.spareSlots"
        " for a pool, or remove warmSpares",
        {
            "Dedicated": base_model(warmSpares=2),
            "none": base_model(**SHARED, warmSpares=0),
            "a pool": base_model(**SHARED),
        },
        {
            "a pool with spares": base_model(**SHARED, warmSpares=1),
            "a pool with many": base_model(**SHARED, warmSpares=100),
            "a pool of a size": base_model(**SHARED, pool={"minClusters": 1}, warmSpares=1),
        },
    ),
    Rule(
        "spec",
        "pool: only valid with sharing Shared; set sharing to Shared, or remove pool",
        {
            "a pool": pool(minClusters=1),
            "a pool of the default size": base_model(**SHARED),
            "no pool": base_model(),
        },
        {
            "Dedicated": base_model(sharing="Dedicated", pool={"minClusters": 1}),
            "by default": base_model(pool={"maxClusters": 2}),
            "nothing but defaults": base_model(pool={}),
        },
    ),
    Rule(
        "spec.pool",
        "minClusters: must not exceed maxClusters",
        {
            "equal": pool(minClusters=3, maxClusters=3),
            "fewer": pool(minClusters=1, maxClusters=3),
            "the default maximum": pool(minClusters=1),
        },
        {
            "more": pool(minClusters=4, maxClusters=3),
            "more than the default maximum": pool(minClusters=2),
            "many more": pool(minClusters=100, maxClusters=1),
        },
    ),
    Rule(
        "spec",
        "role: sharing, modelId, lora, restoreFrom, trainer, sampler and program are not valid for"
        " roles Pool and Spare; remove them",
        {
            "a cluster": session(**POOL),
            "a spare": session(**SPARE),
            "a suspended cluster": session(**POOL, suspend=True),
            "a queue": session(**POOL, queueName="research"),
        },
        {
            "lora": session(role="Pool"),
            "lora of a spare": session(role="Spare"),
            "modelId": session(**POOL, modelId="run:train:0"),
            "restoreFrom": session(**POOL, restoreFrom=RESTORED),
            "trainer": session(**POOL, trainer={"replicas": 1}),
            "sampler": session(**POOL, sampler={"replicas": 1}),
            "program": session(**POOL, program=PROGRAM),
        },
    ),
    Rule(
        "spec",
        "sharing: Shared requires lora and modelId, because full fine-tuning and sessions from your"
        " own manifests need their own pods; remove sharing",
        {
            "LoRA": session(**RUN),
            "a sampler": session(**SHARED, role="Sampler", lora=None),
            "full fine-tuning with its own pods": session(lora=None),
        },
        {
            "full fine-tuning": session(**RUN, lora=None),
            "full fine-tuning of a checkpoint": session(**RUN, lora=None, restoreFrom=RESTORED),
            "from a manifest": session(**SHARED),
        },
    ),
    Rule(
        "spec",
        "sharing: trainer, sampler, queueName, priorityClassName and program are not valid with"
        " Shared, because the session has no pods of its own; remove them",
        {
            "a run": session(**RUN),
            "an idle policy": session(**RUN, idle={"timeoutSeconds": 60, "action": "Delete"}),
            "a checkpoint": session(**RUN, restoreFrom=RESTORED),
        },
        {
            "trainer": session(**RUN, trainer={"replicas": 1}),
            "sampler": session(**RUN, sampler={"replicas": 1}),
            "queueName": session(**RUN, queueName="research"),
            "priorityClassName": session(**RUN, priorityClassName="high"),
            "program": session(**RUN, program=PROGRAM),
        },
    ),
    Rule(
        "spec",
        "poolCluster: only valid with sharing Shared or role Trainer; remove it",
        {
            "placed": session(**RUN, poolCluster="pool-a"),
            "waiting": session(**RUN),
            "with its own pods": session(),
            "with a spare": session(poolCluster="spare-a"),
        },
        {
            "a sampler": session(role="Sampler", lora=None, poolCluster="pool-a"),
            "a spare": session(**SPARE, poolCluster="pool-a"),
            "a cluster": session(**POOL, poolCluster="pool-a"),
        },
    ),
)
