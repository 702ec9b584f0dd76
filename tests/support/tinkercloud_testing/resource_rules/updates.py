"""Updates of resources: cases for each rule."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tinkercloud_testing.resource_rules.rule import IMMUTABLE, Rule, base_model, session
from tinkercloud_testing.resource_rules.sessions import SAMPLER
from tinkercloud_testing.resources.sessions import MODEL_NAME, TRAINERS, Json

BASE_MODEL_CHANGES: Mapping[str, Json] = {
    "context": {"maxContextLength": 8192},
    "image": {"head": {"image": "worker:2"}},
    "trainers": {"trainer": TRAINERS},
}
SESSION_CHANGES: Mapping[str, Json] = {
    "suspended": {"suspend": True},
    "idle policy": {"idle": {"timeoutSeconds": 60, "action": "Delete"}},
    "longer kept": {"ttlSecondsAfterFinished": 86400, "maxLifetimeSeconds": 600},
}
RUNS = [f"run-{number}:train:0" for number in range(4)]
PATHS: list[Json] = [{"path": f"tinker://run:train:{n}/weights/last"} for n in range(4)]
RANKS: list[Json] = [{"rank": rank} for rank in (8, 16, 1, 1024)]
QUEUES = ["research", "urgent", "night", "other"]


def never_changes(kind: str, name: str, value: Any, *others: Any) -> Rule:
    """Return the rule of an immutable field of a resource whose other fields may change."""
    given: Json = {name: value}
    build = base_model if kind == "BaseModel" else partial(session, **given)
    changes = BASE_MODEL_CHANGES if kind == "BaseModel" else SESSION_CHANGES
    return Rule(
        f"spec.{name}",
        IMMUTABLE.replace("session", "BaseModel") if kind == "BaseModel" else IMMUTABLE,
        {title: build(**change) for title, change in changes.items()},
        {str(other): build(**{name: other}) for other in others},
        before=build(),
    )


def stays_set_or_unset(name: str, *values: Any) -> Rule:
    """Return the rule of an optional field that cannot be added or removed later."""
    absent: Json = {name: None}
    return Rule(
        "spec",
        f"{name}: cannot be added or removed after creation",
        {title: session(**absent | change) for title, change in SESSION_CHANGES.items()},
        {str(value): session(**{name: value}) for value in values},
        before=session(**absent),
    )


UPDATE_RULES = (
    never_changes("BaseModel", "modelName", MODEL_NAME, "Qwen/Qwen3-32B", "qwen", "a/b"),
    never_changes("TrainingSession", "baseModel", MODEL_NAME, "Qwen/Qwen3-32B", "qwen", "a/b"),
    never_changes("TrainingSession", "modelId", *RUNS),
    never_changes("TrainingSession", "owner", "ada", "bob", "Ada", "ada "),
    never_changes("TrainingSession", "lora", *RANKS),
    never_changes("TrainingSession", "restoreFrom", *PATHS),
    never_changes("TrainingSession", "queueName", *QUEUES),
    Rule(
        "spec.sharing",
        IMMUTABLE,
        {
            "suspended": session(modelId=RUNS[0], sharing="Shared", suspend=True),
            "placed": session(modelId=RUNS[0], sharing="Shared", poolCluster="pool-a"),
            "longer kept": session(
                modelId=RUNS[0], sharing="Shared", ttlSecondsAfterFinished=86400
            ),
        },
        {
            "Dedicated": session(modelId=RUNS[0], sharing="Dedicated"),
            "by default": session(modelId=RUNS[0]),
            "suspended": session(modelId=RUNS[0], suspend=True),
        },
        before=session(modelId=RUNS[0], sharing="Shared"),
    ),
    stays_set_or_unset("modelId", *RUNS[:3]),
    stays_set_or_unset("lora", *RANKS[:3]),
    stays_set_or_unset("restoreFrom", *PATHS[:3]),
    stays_set_or_unset("queueName", *QUEUES[:3]),
    Rule(
        "spec.role",
        IMMUTABLE,
        {title: session(lora=None, **change) for title, change in SESSION_CHANGES.items()},
        {
            "Sampler": session(**SAMPLER),
            "Sampler, suspended": session(**SAMPLER, suspend=True),
            "Sampler, fewer": session(**SAMPLER, sampler={"replicas": 1}),
        },
        before=session(lora=None),
    ),
)
