"""The status of a BaseModel: whether it is active, and what its sessions use."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelStatus
from tinkercloud_crds.conditions import ConditionType, Reason, find, timestamp
from tinkercloud_crds.idle_gpus import IdleGpus
from tinkercloud_operator.decide.pool.base_model_status import after_a_gap, base_model_status
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


def unused(gpus: int, **spec: Any) -> Json:
    status = {"phase": "Ready", "gpus": gpus, "idleSince": timestamp(NOON)}
    return a_session_manifest(**spec) | {"status": status}


def written(status: BaseModelStatus) -> Json:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


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

    later = NOON + timedelta(hours=1)
    again = base_model_status(
        offered(status=written(first)), offered(), [session("Ready", 3)], later
    )

    assert again == first


def test_idle_gpus_are_those_of_unused_sessions_clusters_and_spares() -> None:
    sessions = [
        session("Ready", 16),
        unused(4),
        unused(2, role="Pool", owner="tinkercloud-pool", lora=None),
        unused(1, role="Spare", owner="tinkercloud-pool", lora=None),
        unused(0, sharing="Shared", poolCluster="pool-0"),
    ]

    status = base_model_status(offered(), offered(), sessions, NOON)

    assert (status.gpus, status.idle.gpus, status.idle.gpu_hours) == (23, 7, 0)


def test_idle_hours_are_counted_and_written_when_the_number_of_idle_gpus_changes() -> None:
    def after(minutes: int, before: BaseModelStatus, *sessions: Json) -> BaseModelStatus:
        now = NOON + timedelta(minutes=minutes)
        return base_model_status(offered(status=written(before)), offered(), sessions, now)

    first = base_model_status(offered(), offered(), [session("Ready", 2), unused(4)], NOON)
    resting = after(30, first, session("Ready", 2), unused(4))
    used = after(90, resting, session("Ready", 2), session("Ready", 4))
    gone = after(600, used)

    assert resting == first
    assert resting.idle.at(NOON + timedelta(minutes=30)).gpu_hours == 2
    assert (used.idle.gpus, used.idle.gpu_hours) == (0, 6)
    assert used.idle.gpu_hours_by_month == {"2026-01": 6}
    assert gone.idle == used.idle


def used_at(moment: datetime, unused_session: Json) -> Json:
    annotations = {labels.LAST_ACTIVITY: timestamp(moment)}
    return {
        **unused_session,
        "metadata": {**unused_session["metadata"], "annotations": annotations},
    }


def test_only_gpus_that_nobody_has_used_count_as_idle_while_no_operator_ran() -> None:
    ten_hours, unknown = NOON + timedelta(hours=10), NOON + timedelta(hours=2)
    at_rest = [
        used_at(NOON - timedelta(minutes=5), unused(1)),
        unused(2, role="Spare", owner="tinkercloud-pool", lora=None),
    ]
    later = {"phase": "Ready", "gpus": 16, "idleSince": timestamp(ten_hours - timedelta(hours=1))}
    since_then = [used_at(unknown, unused(4)), session("Ready", 8), a_session_manifest()]
    before = base_model_status(offered(), offered(), [unused(31)], NOON)

    known = after_a_gap(
        offered(status=written(before)),
        [*at_rest, *since_then, a_session_manifest() | {"status": later}],
    )
    after = base_model_status(known, offered(), at_rest[1:], ten_hours)

    assert known["status"]["idle"]["gpus"] == 3
    assert (after.idle.gpus, after.idle.gpu_hours) == (2, 30)


def test_nothing_changes_while_no_operator_ran_if_nothing_was_used() -> None:
    before = base_model_status(offered(), offered(), [unused(4)], NOON)
    stored = offered(status=written(before))

    assert after_a_gap(stored, [unused(4)]) == stored
    assert after_a_gap(offered(), [unused(4)]) == offered()


def test_a_clock_that_is_set_back_counts_no_hours_twice() -> None:
    first = base_model_status(offered(), offered(), [unused(4)], NOON)
    earlier, later = NOON - timedelta(hours=1), NOON + timedelta(hours=1)

    back = base_model_status(offered(status=written(first)), offered(), [unused(2)], earlier)
    after = base_model_status(offered(status=written(back)), offered(), [], later)

    assert (back.idle.since, back.idle.gpu_hours) == (timestamp(NOON), 0)
    assert after.idle.gpu_hours == 2


def test_hours_of_gpus_that_stay_idle_belong_to_the_months_in_which_they_passed() -> None:
    since = datetime(2026, 11, 30, 22, 0, tzinfo=UTC)
    before = {"2026-10": 1.5, "2026-11": 0.5}
    idle = IdleGpus(gpus=2, since=timestamp(since), gpu_hours=40, gpu_hours_by_month=before)

    after = idle.at(datetime(2027, 1, 1, 1, 30, tzinfo=UTC))

    months = {"2026-10": 1.5, "2026-11": 4.5, "2026-12": 2 * 31 * 24, "2027-01": 3}
    assert after.gpu_hours_by_month == months
    assert after.gpu_hours == 40 + 4 + 2 * 31 * 24 + 3
    assert idle.at(since - timedelta(days=1)).gpu_hours == 40


def test_thirteen_months_of_idle_hours_are_kept_and_all_are_in_the_sum() -> None:
    idle = IdleGpus(gpus=1, since="2026-01-01T00:00:00Z")

    after = idle.at(datetime(2027, 6, 1, tzinfo=UTC))

    assert len(after.gpu_hours_by_month) == 13
    assert min(after.gpu_hours_by_month) == "2026-05"
    assert after.gpu_hours == (365 + 151) * 24
