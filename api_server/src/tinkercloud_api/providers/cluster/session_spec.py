"""Builds TrainingSession manifests and checks the options of runs. Pure functions."""

import hashlib
import re
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from tinkercloud_api.providers.base import Placement
from tinkercloud_api.providers.cluster.session_status import BaseModelView, TrainingSessionView
from tinkercloud_api.providers.session_options import PREFIX, SessionOptions
from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_crds.pods.shapes import Idle
from tinkercloud_crds.training_session import Lora, RestoreFrom, TrainingSessionSpec
from tinkercloud_kube.objects import Manifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.json_model import describe
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

_MAX_SEED = 2**53
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def session_name(placement: Placement) -> str:
    """Return the name of the TrainingSession that is created for a placement.

    For a run: `ts-<client session>-<index>-<check>`, such as `ts-4f9c2a71-0-b81c09de`, with 8 hex
    digits of the client session's hash and 8 of the model id's hash. The runs of one client are
    adjacent in a list, and two ids share a name only if two independent hashes collide. A head must
    never receive another run's data, so `is_of` also compares the model id in the spec, which is
    immutable. For samplers of one owner and base model: `sampler-<hash>`. Names have at most 40
    characters and start with a letter.
    """
    if placement.model is None:
        return f"sampler-{_digest(placement.owner, placement.base_model)[:16]}"
    model_id = ModelId.parse(placement.target)
    session, check = _digest(model_id.session_id), _digest(placement.target)
    return f"ts-{session[:8]}-{model_id.index}-{check[:8]}"


def is_of(session: TrainingSessionView, placement: Placement) -> bool:
    """Whether a session with a placement's name was created for it, and not for a colliding one."""
    spec = session.spec
    if placement.model is not None:
        return spec.model_id == placement.target and spec.owner == placement.owner
    return (spec.owner, spec.base_model) == (placement.owner, placement.base_model)


def owner_label(owner: str) -> str:
    """Return an owner as a label value: unchanged if it is valid, otherwise its hash."""
    return owner if _LABEL.fullmatch(owner) else f"sha256-{_digest(owner)[:32]}"


def training_session(
    placement: Placement, base_model: BaseModelView | None, now: datetime
) -> Manifest:
    """Return the TrainingSession of a placement.

    Args:
        placement: the run or samplers that the session serves.
        base_model: the BaseModel of the placement, if it still exists.
        now: time of the request.

    Raises:
        InvalidRequest: the TrainingSession would be invalid; the message names the field.
    """
    spec: dict[str, Any] = {"base_model": placement.base_model, "owner": placement.owner}
    if placement.model is None:
        spec["role"] = "Sampler"
    else:
        spec |= _training(placement.target, placement.model)
    if base_model is not None and is_shared(placement, base_model):
        spec["sharing"] = "Shared"
    spec |= _options(placement.options, base_model)
    try:
        declared = TrainingSessionSpec(**spec)
    except ValidationError as error:
        raise InvalidRequest(
            f"cannot create a TrainingSession for this request: {describe(error)}"
        ) from None
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


def is_shared(placement: Placement, base_model: BaseModelView) -> bool:
    """Whether a pool serves a placement: samplers and LoRA runs of a BaseModel that has one."""
    is_full = placement.model is not None and placement.model.lora is None
    return base_model.spec.sharing == "Shared" and not is_full


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
    # The resource accepts only this kind; the head receives any kind in its model spec.
    return CheckpointPath.parse(path).kind is CheckpointKind.TRAINING


def _lora(lora: LoraConfig) -> Lora:
    return Lora(
        rank=lora.rank,
        # Larger seeds are not exact as JSON numbers; the head receives the seed in its model spec.
        seed=lora.seed if lora.seed is not None and lora.seed <= _MAX_SEED else None,
        train_attention=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def _options(options: SessionOptions, base_model: BaseModelView | None) -> dict[str, Any]:
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


def check_options(placement: Placement, base_model: BaseModelView) -> None:
    """Check that a run's options are allowed.

    Raises:
        InvalidRequest: the BaseModel does not allow an option; the message lists allowed values.
    """
    policy, own = base_model.spec.sessions, base_model.spec.placement
    if is_shared(placement, base_model):
        _check_no_pods(placement.options, base_model)
    options = placement.options
    _check_name("queue", options.queue, own.queue_name, policy.queue_names)
    _check_name("priority", options.priority, own.priority_class_name, policy.priority_class_names)
    longest = policy.max_idle_timeout_seconds
    if options.idle_timeout is not None and longest is not None and options.idle_timeout > longest:
        raise InvalidRequest(
            f"{PREFIX}idle-timeout: got {options.idle_timeout}; base model"
            f" {base_model.spec.model_name!r} allows at most {longest} seconds"
        )


def _check_no_pods(options: SessionOptions, base_model: BaseModelView) -> None:
    """Check that no option of pods is set for a run without pods of its own."""
    chosen = [("queue", options.queue), ("priority", options.priority)]
    if found := [f"{PREFIX}{name}" for name, value in chosen if value is not None]:
        raise InvalidRequest(
            f"{', '.join(found)}: base model {base_model.spec.model_name!r} serves runs from a"
            " shared pool, so a run has no pods of its own; remove the option"
        )


def _check_name(option: str, value: str | None, own: str | None, others: list[str]) -> None:
    allowed = [*([own] if own is not None else []), *others]
    if value is not None and value not in allowed:
        values = ", ".join(map(repr, allowed)) or "none; remove the option"
        raise InvalidRequest(
            f"{PREFIX}{option}: {value!r} is not allowed; allowed values: {values}"
        )


def attached_model(placement: Placement, session: TrainingSessionView | None) -> ModelSpec:
    """Return the model spec of a run that attaches to a session declared by somebody else.

    The seed and the checkpoint to start from default to those of the declaration.

    Raises:
        NotFound: the session does not exist for the run's owner.
        InvalidRequest: the session does not match the run; the message names the differences.
    """
    name = placement.options.session
    if session is None or session.spec.owner != placement.owner:
        raise NotFound(
            f"{PREFIX}session: TrainingSession {name!r} does not exist, or belongs to another owner"
        )
    spec, model = session.spec, placement.model
    assert model is not None  # noqa: S101 - only runs are admitted
    if spec.model_id is not None or spec.role != "Trainer":
        raise InvalidRequest(
            f"{PREFIX}session: no run can attach to TrainingSession {name!r}; its spec.role"
            " must be Trainer, and spec.modelId must be unset"
        )
    if others := [key for key in placement.options.set_keys() if key != f"{PREFIX}session"]:
        raise InvalidRequest(
            f"{', '.join(others)}: set by TrainingSession {name!r} itself; remove the option"
        )
    if differences := _differences(placement, model, spec):
        raise InvalidRequest(
            f"{PREFIX}session: TrainingSession {name!r} does not match this run:"
            f" {'; '.join(differences)}"
        )
    return _completed(model, spec)


def _differences(placement: Placement, model: ModelSpec, spec: TrainingSessionSpec) -> list[str]:
    if spec.program is not None and spec.program.id is not None:
        # The API server created the session for a program, before any model of it was known.
        return (
            [] if spec.base_model == placement.base_model else [_other_base_model(spec, placement)]
        )
    declared, requested = spec.lora, _lora(model.lora) if model.lora is not None else None
    pairs: list[tuple[str, object, object]] = [
        ("baseModel", spec.base_model, placement.base_model),
        ("optimizer", spec.optimizer, model.optimizer.type),
    ]
    if declared is None or requested is None:
        pairs.append(("lora", _kind(declared), _kind(requested)))
    else:
        pairs += [
            (f"lora.{field}", getattr(declared, attribute), getattr(requested, attribute))
            for field, attribute in (
                ("rank", "rank"),
                ("trainAttention", "train_attention"),
                ("trainMlp", "train_mlp"),
                ("trainUnembed", "train_unembed"),
            )
        ]
        if declared.seed is not None and requested.seed is not None:
            pairs.append(("lora.seed", declared.seed, requested.seed))
    return [
        f"{name} is {has!r} in the session, but {wants!r} was requested"
        for name, has, wants in pairs
        if has != wants
    ]


def _other_base_model(spec: TrainingSessionSpec, placement: Placement) -> str:
    return (
        f"baseModel is {spec.base_model!r} in the session, but {placement.base_model!r} was"
        " requested"
    )


def _kind(lora: Lora | None) -> str:
    return "full fine-tuning" if lora is None else "LoRA"


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
