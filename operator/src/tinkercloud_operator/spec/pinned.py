"""The spec that a session keeps for as long as its pods run: pure.

A head counts its ranks and engines at startup, and a replacement for a lost pod must be equal to
the others. The RayCluster therefore pins, in an annotation, the spec that it was created with. All
children follow the pinned spec until the RayCluster is deleted or Kueue holds it back. Later
changes to the BaseModel or the session wait until then.
"""

from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec, Limits, SessionPolicy
from tinkercloud_crds.pods.shapes import TrainerShape
from tinkercloud_operator.spec.observed import Observed
from tinkercloud_operator.spec.resolved import (
    Rejection,
    ResolvedSpec,
    missing_fields,
    trains_whole_model,
)

_NAMED_CHANGES = 8
"""Maximum number of changes named in a message."""


def to_annotation(resolved: ResolvedSpec) -> str:
    """Return the annotation that pins a spec on a new RayCluster."""
    return _as_base_model(resolved).model_dump_json(by_alias=True)


def pinned_spec(observed: Observed) -> ResolvedSpec | None:
    """Return the spec that a session's pods were created with; None if none is readable."""
    text = _annotations(observed).get(labels.STARTED_WITH, "")
    try:
        description = BaseModelSpec.model_validate_json(text)
    except ValidationError:
        return None
    if missing_fields(description):
        return None
    return ResolvedSpec(
        base_model=description,
        trainer=description.trainer if observed.session.spec.role != "Sampler" else None,
        sampler=description.sampler,
        placement=description.placement,
        trains_whole_model=trains_whole_model(observed.session.spec),
        plan=observed.session.status.plan,
    )


def pinned_head_config(observed: Observed, resolved: ResolvedSpec) -> str | None:
    """Return the configuration that the current head received; None if the spec has changed.

    A head that restarts in its pod keeps its image, which may be older than this operator and not
    understand a newer configuration.
    """
    pinned = pinned_spec(observed)
    if pinned is None or observed.is_suspended_by_kueue or pending_changes(pinned, resolved):
        return None
    return _annotations(observed).get(labels.HEAD_CONFIG)


def pending_changes(
    pinned: ResolvedSpec | Rejection, desired: ResolvedSpec | Rejection
) -> list[str]:
    """Return the BaseModel fields in which two specs differ, with both values."""
    if not isinstance(pinned, ResolvedSpec) or not isinstance(desired, ResolvedSpec):
        return []
    before, after = (
        _as_base_model(resolved).model_dump(by_alias=True) for resolved in (pinned, desired)
    )
    return list(_differences(before, after))[:_NAMED_CHANGES]


def _annotations(observed: Observed) -> Mapping[str, str]:
    cluster = observed.ray_cluster or {"metadata": {}}
    found: Mapping[str, str] = cluster["metadata"].get("annotations", {})
    return found


def _as_base_model(resolved: ResolvedSpec) -> BaseModelSpec:
    """Return a BaseModel that offers exactly this spec, without fields that do not affect pods.

    Without trainers, the trainer's dtype is kept, since it is the dtype of the engines.
    """
    base_model, trainer = resolved.base_model, resolved.trainer
    if trainer is None:
        trainer = TrainerShape(dtype=base_model.trainer.dtype)
    return base_model.model_copy(
        update={
            "trainer": trainer.model_copy(update={"planning": None}),
            "sampler": resolved.sampler,
            "placement": resolved.placement,
            "limits": Limits(max_lora_rank=base_model.limits.max_lora_rank),
            "sessions": SessionPolicy.model_validate({}),
            "tokenizer": None,
            "programs": None,
            "sharing": "Dedicated",
            "pool": None,
            "warm_spares": 0,
        }
    )


def _differences(before: object, after: object, path: str = "") -> Iterable[str]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            within = f"{path}.{key}" if path else str(key)
            yield from _differences(before.get(key), after.get(key), within)
    else:
        is_short = len(f"{before}{after}") < 80
        yield f"{path} ({before}, now {after})" if is_short else path
