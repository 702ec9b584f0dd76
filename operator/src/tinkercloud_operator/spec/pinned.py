"""What a session was started with, which it keeps for as long as its pods run: pure.

A head counts its ranks and its engines when it starts, and what comes up in the place of a lost pod
must be like the others. So a RayCluster says, in an annotation, what it was made with: all children
follow from that until it is gone, or until Kueue holds it back. What the BaseModel or the session
say meanwhile waits for that.
"""

from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec, Limits, SessionPolicy
from tinkercloud_crds.shapes import TrainerShape
from tinkercloud_operator.spec.resolved import Rejection, ResolvedSpec, missing_fields
from tinkercloud_operator.spec.snapshot import Observed

_NAMED_CHANGES = 8
"""In a message, at most."""


def to_annotation(resolved: ResolvedSpec) -> str:
    """Return what is written on a RayCluster that is made with this resolved."""
    return _as_base_model(resolved).model_dump_json(by_alias=True)


def pinned_spec(observed: Observed) -> ResolvedSpec | None:
    """Return what a session's pods were made with; None if nothing readable says so."""
    text = _annotations(observed).get(labels.STARTED_WITH, "")
    try:
        description = BaseModelSpec.model_validate_json(text)
    except ValidationError:
        return None
    if missing_fields(description):
        return None
    return ResolvedSpec(
        base_model=description,
        trainer=description.trainer if observed.spec.role == "Trainer" else None,
        sampler=description.sampler,
        placement=description.placement,
        plan=observed.status.plan,
    )


def pinned_head_config(observed: Observed, resolved: ResolvedSpec) -> str | None:
    """Return what the head of a session's pods was told; None if they are of another resolved.

    A head that starts over in its pod has the image that it had, which may know less than this
    operator would tell one by now.
    """
    pinned = pinned_spec(observed)
    if pinned is None or observed.is_suspended_by_kueue or pending_changes(pinned, resolved):
        return None
    return _annotations(observed).get(labels.HEAD_CONFIG)


def pending_changes(
    pinned: ResolvedSpec | Rejection, desired: ResolvedSpec | Rejection
) -> list[str]:
    """Return the fields, of a BaseModel's spec, in which two shapes differ, with their values."""
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
    """Return the BaseModel that offers this resolved and nothing else; what makes no pod is left out.

    Of the trainers that a sampler does not have, its engines have the dtype.
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
        }
    )


def _differences(before: object, after: object, path: str = "") -> Iterable[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            within = f"{path}.{key}" if path else str(key)
            yield from _differences(before.get(key), after.get(key), within)
    elif before != after:
        is_short = len(f"{before}{after}") < 80
        yield f"{path} ({before}, now {after})" if is_short else path
