"""The status of a BaseModel: whether it is active, and what its sessions use."""

import json
from datetime import timedelta
from typing import Any

import pytest

from tinkercloud_crds.base_model import BaseModelStatus
from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_operator.decide.pool.base_model_status import base_model_status
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.spec.resolved import Rejection, resolve
from tinkercloud_testing.resources.sessions import (
    NOON,
    TRAINERS,
    Json,
    a_base_model_manifest,
    a_session,
    a_session_manifest,
)


def offered(name: str = "model", **others: Any) -> Json:
    manifest = a_base_model_manifest(name)
    metadata = {**manifest["metadata"], "uid": f"uid-of-{name}", "generation": 3}
    return {**manifest, "metadata": metadata, **others}


def session(phase: str, gpus: int = 0) -> Json:
    return a_session_manifest() | {"status": {"phase": phase, "gpus": gpus}}


def reasons(status: BaseModelStatus) -> dict[str, tuple[str, str]]:
    return {item.type: (item.status, item.reason) for item in status.conditions}


def test_an_active_base_model_is_ready() -> None:
    status = base_model_status(offered(), offered(), [], NOON)

    assert reasons(status) == {
        "Ready": ("True", Reason.ACCEPTED),
        "Reconciling": ("False", Reason.STABLE),
        "Stalled": ("False", Reason.ACCEPTED),
    }
    assert status.observed_generation == 3


def test_the_status_counts_live_sessions_and_their_gpus() -> None:
    sessions = [
        session("Ready", 3),
        session("Queued", 0),
        session("Suspended"),
        session("Loading", 5),
    ]

    status = base_model_status(offered(), offered(), sessions, NOON)

    assert (status.live_sessions, status.gpus) == (3, 8)


def test_a_duplicate_base_model_is_stalled_and_names_the_older_one() -> None:
    status = base_model_status(offered("younger"), offered("older"), [session("Ready", 3)], NOON)

    ready = find(status.conditions, ConditionType.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", Reason.DUPLICATE)
    assert "'older'" in ready.message
    assert (status.live_sessions, status.gpus) == (0, 0)


def test_an_unreadable_base_model_is_stalled() -> None:
    status = base_model_status(offered(spec={"modelName": "x"}), None, [], NOON)

    assert reasons(status)["Ready"][0] == "False"
    assert reasons(status)["Stalled"][0] == "True"


CONFIG: Json = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


EXTENDED: Json = CONFIG | {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
}
"""As Qwen's model cards extend the model."""


def planned(config: str = json.dumps(CONFIG), gpu: str = "H100", length: int = 32768) -> Json:
    trainer = {**TRAINERS, "planning": {"gpu": gpu, "config": config}}
    spec = a_base_model_manifest(trainer=trainer, maxContextLength=length)["spec"]
    return offered(spec=spec)


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (planned(gpu="H1000"), "'H1000'"),
        (planned("{]"), "Expecting property name"),
        (planned("[" * 16000), "nested too deeply"),
        (planned("[]"), "expected the JSON object"),
        (planned('{"model_type": "bert"}'), "model_type: 'bert'"),
        (planned(length=32769), "maxContextLength is 32769"),
        (planned(json.dumps(EXTENDED), length=131073), "at most 131072 tokens"),
    ],
    ids=["GPU", "no JSON", "deep", "no object", "model", "length", "extended length"],
)
def test_a_base_model_that_cannot_be_planned_is_stalled_with_the_reason(
    manifest: Json, expected: str
) -> None:
    status = base_model_status(manifest, manifest, [session("Ready", 3)], NOON)

    ready = find(status.conditions, ConditionType.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", Reason.NOT_ALLOWED)
    assert ready.message.startswith("trainer.planning: ")
    assert expected in ready.message
    assert reasons(status)["Stalled"][0] == "True"
    assert (status.live_sessions, status.gpus) == (1, 3)
    assert isinstance(resolve(a_session(), parsing.base_model(manifest), 0), Rejection)


@pytest.mark.parametrize(
    "manifest", [planned(), planned(json.dumps(EXTENDED), length=131072)], ids=["own", "extended"]
)
def test_a_base_model_that_can_be_planned_is_ready(manifest: Json) -> None:
    status = base_model_status(manifest, manifest, [], NOON)

    assert reasons(status)["Ready"] == ("True", Reason.ACCEPTED)


def test_a_second_reconciliation_changes_nothing() -> None:
    first = base_model_status(offered(), offered(), [session("Ready", 3)], NOON)
    written = first.model_dump(mode="json", by_alias=True, exclude_none=True)

    later = NOON + timedelta(hours=1)
    again = base_model_status(offered(status=written), offered(), [session("Ready", 3)], later)

    assert again == first
