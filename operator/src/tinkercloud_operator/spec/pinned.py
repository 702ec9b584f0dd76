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
from tinkercloud_operator.spec.resolved import Refusal, Shape, lacking
from tinkercloud_operator.spec.snapshot import Observed

_NAMED_CHANGES = 8
"""In a message, at most."""


def record(shape: Shape) -> str:
    """Return what is written on a RayCluster that is made with this shape."""
    return _description(shape).model_dump_json(by_alias=True)


def started_with(observed: Observed) -> Shape | None:
    """Return what a session's pods were made with; None if nothing readable says so."""
    text = _annotations(observed).get(labels.STARTED_WITH, "")
    try:
        description = BaseModelSpec.model_validate_json(text)
    except ValidationError:
        return None
    if lacking(description):
        return None
    return Shape(
        base_model=description,
        trainer=description.trainer if observed.spec.role == "Trainer" else None,
        sampler=description.sampler,
        placement=description.placement,
        plan=observed.status.plan,
    )


def told_head(observed: Observed, shape: Shape) -> str | None:
    """Return what the head of a session's pods was told; None if they are of another shape.

    A head that starts over in its pod has the image that it had, which may know less than this
    operator would tell one by now.
    """
    held = started_with(observed)
    if held is None or observed.is_held_back or changes(held, shape):
        return None
    return _annotations(observed).get(labels.HEAD_CONFIG)


def changes(held: Shape | Refusal, offered: Shape | Refusal) -> list[str]:
    """Return the fields, of a BaseModel's spec, in which two shapes differ, with their values."""
    if not isinstance(held, Shape) or not isinstance(offered, Shape):
        return []
    before, after = (_description(shape).model_dump(by_alias=True) for shape in (held, offered))
    return list(_differences(before, after))[:_NAMED_CHANGES]


def _annotations(observed: Observed) -> Mapping[str, str]:
    cluster = observed.ray_cluster or {"metadata": {}}
    found: Mapping[str, str] = cluster["metadata"].get("annotations", {})
    return found


def _description(shape: Shape) -> BaseModelSpec:
    """Return the BaseModel that offers this shape and nothing else; what makes no pod is left out.

    Of the trainers that a sampler does not have, its engines have the dtype.
    """
    base_model, trainer = shape.base_model, shape.trainer
    if trainer is None:
        trainer = TrainerShape(dtype=base_model.trainer.dtype)
    return base_model.model_copy(
        update={
            "trainer": trainer.model_copy(update={"planning": None}),
            "sampler": shape.sampler,
            "placement": shape.placement,
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
