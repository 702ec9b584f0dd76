"""TrainingSessions as the API server declares them: names, objects and what may be asked for.

Pure functions.
"""

import hashlib
import re
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from tinkercloud_api.providers.base import Placement
from tinkercloud_api.providers.cluster_api import Manifest
from tinkercloud_api.providers.session_options import PREFIX, SessionOptions
from tinkercloud_api.providers.session_status import BaseModelView, TrainingSessionView
from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_crds.shapes import Idle
from tinkercloud_crds.training_session import Lora, RestoreFrom, TrainingSessionSpec
from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_protocol.ids import ModelId
from tinkercloud_protocol.launch import ModelSpec
from tinkercloud_protocol.paths import CheckpointKind, CheckpointPath
from tinkercloud_protocol.wire import describe

_MAX_SEED = 2**53
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def session_name(placement: Placement) -> str:
    """Return the name of the TrainingSession that serves a placement unless another one does.

    `ts-<client session>-<index>-<check>` for a run, such as `ts-4f9c2a71-0-b81c09de`: 8 hex digits
    of the client session's hash and 8 of the whole model id's, so that the runs of one client stand
    together in a list and two ids share a name only if two independent hashes collide at once. A
    head must never get another run's bytes, so even then nothing is shared: `is_of` compares the
    model id that the specification states, which cannot be changed. `sampler-<hash>` for samplers
    of one owner and base model. At most 40 characters, begins with a letter.
    """
    if placement.model is None:
        return f"sampler-{_digest(placement.owner, placement.base_model)[:16]}"
    model_id = ModelId.parse(placement.target)
    session, check = _digest(model_id.session_id), _digest(placement.target)
    return f"ts-{session[:8]}-{model_id.index}-{check[:8]}"


def is_of(session: TrainingSessionView, placement: Placement) -> bool:
    """Whether a session of a placement's name was made for it, and not for another of that name."""
    spec = session.spec
    if placement.model is not None:
        return spec.model_id == placement.target and spec.owner == placement.owner
    return (spec.owner, spec.base_model) == (placement.owner, placement.base_model)


def owner_label(owner: str) -> str:
    """Return an owner as a label's value: as it is if it can be one, else its hash."""
    return owner if _LABEL.fullmatch(owner) else f"sha256-{_digest(owner)[:32]}"


def training_session(
    placement: Placement, base_model: BaseModelView | None, now: datetime
) -> Manifest:
    """Return the TrainingSession of a placement.

    Args:
        placement: what it is for.
        base_model: what is offered under the placement's base model, if it still is.
        now: when it was asked for.

    Raises:
        InvalidRequest: no TrainingSession can say this; the message names the field.
    """
    spec: dict[str, Any] = {"base_model": placement.base_model, "owner": placement.owner}
    if placement.model is None:
        spec["role"] = "Sampler"
    else:
        spec |= _training(placement.target, placement.model)
    spec |= _chosen(placement.options, base_model)
    try:
        declared = TrainingSessionSpec(**spec)
    except ValidationError as error:
        raise InvalidRequest(f"no TrainingSession can be made of this: {describe(error)}") from None
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingSession",
        "metadata": {
            "name": session_name(placement),
            "labels": {
                labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
                labels.OWNER_LABEL: owner_label(placement.owner),
            },
            "annotations": {
                labels.LAST_ACTIVITY: timestamp(now),
                labels.CREATED_FOR: placement.target,
            },
        },
        "spec": declared.model_dump(
            mode="json", by_alias=True, exclude_unset=True, exclude_none=True
        ),
    }


def _training(model_id: str, model: ModelSpec) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_id": model_id, "optimizer": model.optimizer.type}
    if model.lora is not None:
        fields["lora"] = _lora(model.lora)
    if model.restore_from is not None and _is_training_checkpoint(model.restore_from):
        fields["restore_from"] = RestoreFrom(
            path=model.restore_from, optimizer=model.restore_optimizer
        )
    return fields


def _is_training_checkpoint(path: str) -> bool:
    # The only kind that the resource can state; the head is told of any.
    return CheckpointPath.parse(path).kind is CheckpointKind.TRAINING


def _lora(lora: LoraConfig) -> Lora:
    return Lora(
        rank=lora.rank,
        # The resource states what a JSON number can; the head is told the seed itself.
        seed=lora.seed if lora.seed is not None and lora.seed <= _MAX_SEED else None,
        train_attention=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def _chosen(options: SessionOptions, base_model: BaseModelView | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if options.queue is not None:
        fields["queue_name"] = options.queue
    if options.priority is not None:
        fields["priority_class_name"] = options.priority
    if options.idle_timeout is not None or options.idle_action is not None:
        default = base_model.spec.sessions.idle if base_model is not None else Idle()
        fields["idle"] = Idle(
            timeout_seconds=options.idle_timeout or default.timeout_seconds,
            action=options.idle_action or default.action,
        )
    return fields


def check_options(options: SessionOptions, base_model: BaseModelView) -> None:
    """Check that a run may choose what it does.

    Raises:
        InvalidRequest: its BaseModel does not allow it; the message lists what is allowed.
    """
    policy, own = base_model.spec.sessions, base_model.spec.placement
    _check_name("queue", options.queue, own.queue_name, policy.queue_names)
    _check_name("priority", options.priority, own.priority_class_name, policy.priority_class_names)
    longest = policy.max_idle_timeout_seconds
    if options.idle_timeout is not None and longest is not None and options.idle_timeout > longest:
        raise InvalidRequest(
            f"{PREFIX}idle-timeout: {options.idle_timeout} is longer than base model"
            f" {base_model.spec.model_name!r} allows ({longest} seconds)"
        )


def _check_name(choice: str, chosen: str | None, own: str | None, others: list[str]) -> None:
    allowed = [*([own] if own is not None else []), *others]
    if chosen is not None and chosen not in allowed:
        offered = ", ".join(map(repr, allowed)) or "none: leave it out"
        raise InvalidRequest(f"{PREFIX}{choice}: {chosen!r} is not allowed; allowed are {offered}")


def attached_model(placement: Placement, session: TrainingSessionView | None) -> ModelSpec:
    """Return the model that a run becomes in a session declared by somebody else.

    A seed and a checkpoint to start from come from the declaration, unless the run states them.

    Raises:
        NotFound: there is no such session for the run's owner.
        InvalidRequest: the session is not what the run asks for; the message names the difference.
    """
    name = placement.options.session
    if session is None or session.spec.owner != placement.owner:
        raise NotFound(f"{PREFIX}session: TrainingSession {name!r} does not exist for this owner")
    spec, model = session.spec, placement.model
    assert model is not None  # noqa: S101 - only runs are admitted
    if spec.model_id is not None or spec.role != "Trainer":
        raise InvalidRequest(
            f"{PREFIX}session: TrainingSession {name!r} was not declared to be attached to; leave"
            " spec.modelId out and let spec.role be Trainer"
        )
    if others := [key for key in placement.options.named() if key != f"{PREFIX}session"]:
        raise InvalidRequest(
            f"{', '.join(others)}: TrainingSession {name!r} decides this itself; leave it out"
        )
    if differences := _differences(placement, model, spec):
        raise InvalidRequest(
            f"{PREFIX}session: TrainingSession {name!r} differs in {'; '.join(differences)}"
        )
    return _completed(model, spec)


def _differences(placement: Placement, model: ModelSpec, spec: TrainingSessionSpec) -> list[str]:
    declared, asked = spec.lora, _lora(model.lora) if model.lora is not None else None
    pairs: list[tuple[str, object, object]] = [
        ("baseModel", spec.base_model, placement.base_model),
        ("optimizer", spec.optimizer, model.optimizer.type),
    ]
    if declared is None or asked is None:
        pairs.append(("lora", _kind(declared), _kind(asked)))
    else:
        pairs += [
            (f"lora.{field}", getattr(declared, attribute), getattr(asked, attribute))
            for field, attribute in (
                ("rank", "rank"),
                ("trainAttention", "train_attention"),
                ("trainMlp", "train_mlp"),
                ("trainUnembed", "train_unembed"),
            )
        ]
        if declared.seed is not None and asked.seed is not None:
            pairs.append(("lora.seed", declared.seed, asked.seed))
    return [f"{name}: {has!r} there, {wants!r} here" for name, has, wants in pairs if has != wants]


def _kind(lora: Lora | None) -> str:
    return "the whole model" if lora is None else "an adapter"


def _completed(model: ModelSpec, spec: TrainingSessionSpec) -> ModelSpec:
    changes: dict[str, Any] = {}
    if model.lora is not None and spec.lora is not None and model.lora.seed is None:
        changes["lora"] = replace(model.lora, seed=spec.lora.seed)
    if model.restore_from is None and spec.restore_from is not None:
        changes["restore_from"] = spec.restore_from.path
        changes["restore_optimizer"] = spec.restore_from.optimizer
    return model.model_copy(update=changes)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
