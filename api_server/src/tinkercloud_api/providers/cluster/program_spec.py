"""Programs as parts of TrainingSessions: specs, Secrets and states. Pure functions."""

import base64
import hashlib
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from tinkercloud_api.providers.cluster.session_spec import owner_label
from tinkercloud_api.providers.cluster.session_status import TrainingSessionView
from tinkercloud_api.providers.program_runner import ProgramLaunch, ProgramState
from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_crds.pods.program_fields import ApiKeySecret, Program, ProgramStatus, SourceSecret
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import Lora, TrainingSessionSpec
from tinkercloud_kube.objects import Manifest
from tinkercloud_protocol.programs.program_messages import API_KEY, ProgramPhase
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import describe


def session_name(launch: ProgramLaunch) -> str:
    """Return the name of the TrainingSession of a program that trains no existing model."""
    return f"program-{_digest(launch.program_id)}"


def secret_name(launch: ProgramLaunch) -> str:
    """Return the name of a program's Secret; another key has another Secret."""
    return f"program-{_digest(launch.program_id, launch.environment[API_KEY])}"


def program(launch: ProgramLaunch) -> Program:
    """Return the `spec.program` of a program.

    Raises:
        InvalidRequest: it would be invalid; the message names the field.
    """
    name = secret_name(launch)
    try:
        return Program(
            id=launch.program_id,
            module=launch.module,
            source_secret=SourceSecret(name=name) if launch.source is not None else None,
            args=list(launch.args),
            env=[],
            api_key_secret=ApiKeySecret(name=name),
        )
    except ValidationError as error:
        raise InvalidRequest(f"cannot run this program on Kubernetes: {describe(error)}") from None


def as_patch(wanted: Program) -> Manifest:
    """Return the merge patch that gives a session this program instead of an earlier one."""
    # An absent field would keep the value of the earlier program.
    return {"spec": {"program": wanted.model_dump(mode="json", by_alias=True)}}


def secret(launch: ProgramLaunch, name: str, session: str, uid: str) -> Manifest:
    """Return the Secret with the key and the source of a program, owned by its session."""
    entries = {ApiKeySecret(name=name).key: launch.environment[API_KEY]}
    if launch.source is not None:
        entries[SourceSecret(name=name).key] = launch.source
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "labels": {labels.MANAGED_BY_LABEL: labels.MANAGED_BY},
            "ownerReferences": [
                {
                    "apiVersion": labels.API_VERSION,
                    "kind": "TrainingSession",
                    "name": session,
                    "uid": uid,
                }
            ],
        },
        "type": "Opaque",
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in entries.items()},
    }


def training_session(launch: ProgramLaunch, base_model: str, now: datetime) -> Manifest:
    """Return the TrainingSession for the models that a program creates.

    It is deleted, with the output of the program, when it has not been used for a while.
    """
    spec = TrainingSessionSpec(
        base_model=base_model, owner=launch.owner, lora=Lora(), program=program(launch)
    )
    found: dict[str, Any] = spec.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude_none=True
    )
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingSession",
        "metadata": {
            "name": session_name(launch),
            "labels": {
                labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
                labels.OWNER_LABEL: owner_label(launch.owner),
            },
            "annotations": {
                labels.LAST_ACTIVITY: timestamp(now),
                labels.CREATED_FOR: launch.program_id,
            },
        },
        "spec": found | {"idle": {"timeoutSeconds": 3600, "action": "Delete"}},
    }


def status_of(session: TrainingSessionView, program_id: str) -> ProgramStatus | None:
    """Return what the operator says of a program; None if it has not seen it yet."""
    found = session.program
    return found if found is not None and found.id == program_id else None


def is_replaceable(session: TrainingSessionView) -> bool:
    """Return whether a session may be given another program: it has none that still runs."""
    now = session.spec.program
    if now is None:
        return True
    status = session.program
    is_known = status is not None and status.id == now.id
    return status is not None and is_known and ProgramPhase(status.phase).is_final


def state_of(status: ProgramStatus) -> ProgramState:
    """Return a status as the runner reports it."""
    return ProgramState(
        ProgramPhase(status.phase),
        restarts=status.restarts,
        exit_code=status.exit_code,
        message=status.message,
        started_at=parse_time(status.start_time),
        finished_at=parse_time(status.finish_time),
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
