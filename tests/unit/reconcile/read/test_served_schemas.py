"""The served CRDs, compared with what the operator writes."""

import copy
from typing import Any

import pytest

from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_crds.generate import KINDS, definition
from tinkercloud_crds.served_schemas import declared, kuberay_gap, own_gap, schema_of
from tinkercloud_operator.decide.session.actions import Apply
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_testing.resources.session_conditions import is_true
from tinkercloud_testing.resources.session_world import SETTINGS, a_world
from tinkercloud_testing.resources.sessions import observed

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
GAP = "requires KubeRay 1.6 or newer: this one is of 1.4"


def closed(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


def served(kind: str) -> Json:
    """Return the schema that the current definition of one of our kinds has."""
    [found] = [definition(each) for each in KINDS if each.kind == kind]
    [version] = found["spec"]["versions"]
    schema: Json = copy.deepcopy(version["schema"]["openAPIV3Schema"])
    return schema


@pytest.mark.parametrize(
    ("spec", "version", "lacking"),
    [
        (closed(rayVersion=TEXT), "1.4 or older", "spec.authOptions"),
        (closed(authOptions=closed(mode=TEXT)), "1.5", "spec.authOptions.secretName"),
    ],
)
def test_an_older_kuberay_is_detected_by_missing_fields(
    spec: Json, version: str, lacking: str
) -> None:
    gap = kuberay_gap(closed(spec=spec))

    assert gap is not None
    assert "requires KubeRay 1.6 or newer" in gap
    assert f"is from KubeRay {version} and lacks {lacking};" in gap


def test_a_crd_with_additional_fields_has_no_gap() -> None:
    spec = closed(authOptions=closed(mode=TEXT, secretName=TEXT, other=TEXT), other=TEXT)

    assert kuberay_gap(closed(spec=spec)) is None


def test_a_schema_that_accepts_any_field_has_no_gap() -> None:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

    assert kuberay_gap(closed(spec=anything)) is None


@pytest.mark.parametrize("kind", [each.kind for each in KINDS])
def test_the_crds_of_this_version_have_no_gap(kind: str) -> None:
    assert own_gap(kind, served(kind)) is None


def test_older_crds_are_detected_by_missing_fields_and_enum_values() -> None:
    schema = served("TrainingSession")
    status = schema["properties"]["status"]["properties"]
    del status["workers"]["properties"]["samplers"]
    del status["conditions"]["items"]["properties"]["message"]
    status["phase"]["enum"].remove("Suspended")

    gap = own_gap("TrainingSession", schema)

    assert gap is not None
    assert "status.workers.samplers" in gap
    assert "status.conditions[].message" in gap
    assert "status.phase=Suspended" in gap
    assert "tinkercloud-crds" in gap


def test_undeclared_fields_are_removed_from_a_status() -> None:
    schema = served("TrainingSession")
    fields = schema["properties"]["status"]["properties"]
    del fields["restarts"]
    del fields["conditions"]["items"]["properties"]["message"]
    fields["phase"]["enum"].remove("Suspended")
    condition = {"type": "Ready", "status": "False", "message": "why"}

    kept = declared(
        {"restarts": 1, "gpus": 2, "phase": "Suspended", "conditions": [condition]}, schema
    )

    assert kept == {"gpus": 2, "conditions": [{"type": "Ready", "status": "False"}]}


def test_a_status_is_unchanged_if_the_schema_is_unknown() -> None:
    assert declared({"restarts": 1}, None) == {"restarts": 1}


def test_the_schema_of_a_kind_is_found_among_lists_and_other_kinds() -> None:
    def published(kind: str, **properties: Json) -> Json:
        group = [{"group": "ray.io", "kind": kind, "version": "v1"}]
        return {**closed(**properties), "x-kubernetes-group-version-kind": group}

    wanted = published("RayCluster", spec=closed())
    schemas = {"a": published("RayClusterList", items=TEXT), "b": published("RayJob"), "c": wanted}

    assert schema_of({"components": {"schemas": schemas}}, "RayCluster") == wanted
    assert schema_of({}, "RayCluster") is None


def test_no_children_are_created_while_kuberay_is_too_old() -> None:
    plan = reconcile(observed(kuberay_gap=GAP), SETTINGS)

    assert not any(isinstance(action, Apply) for action in plan.actions)
    assert plan.status is not None
    assert plan.status.message == GAP
    assert plan.event is not None
    assert plan.event.reason is Reason.KUBERAY_TOO_OLD
    assert plan.event.is_warning


def test_a_running_session_continues_after_kuberay_was_downgraded() -> None:
    world = a_world("workers", "it settles")
    world.change(kuberay_gap=GAP)

    world.operate()

    assert world.status.phase == "Ready"
    provisioned = find(world.status.conditions, ConditionType.CLUSTER_PROVISIONED)
    assert provisioned is not None
    assert GAP in provisioned.message


def test_a_session_starts_once_kuberay_is_upgraded() -> None:
    world = a_world("workers")
    world.change(kuberay_gap=GAP)
    world.happen("the operator reconciles", "a minute passes", "the operator reconciles")
    assert is_true(world.status, ConditionType.STALLED)

    world.change(kuberay_gap=None)
    world.settle()

    assert world.status.phase == "Ready"


def test_a_rejected_undeclared_field_is_reported_as_an_old_kuberay() -> None:
    answer = (
        "PATCH /apis/ray.io/v1/rayclusters/one: 500 failed to create typed patch object"
        " (default/one; ray.io/v1, Kind=RayCluster): .spec.x: field not declared in schema"
    )

    plan = reconcile(observed(apply_error=answer), SETTINGS)

    assert plan.event is not None
    assert plan.event.reason is Reason.KUBERAY_TOO_OLD
    assert "KubeRay 1.6" in plan.event.message
    assert ".spec.x" in plan.event.message


def test_a_running_session_reports_outdated_crds() -> None:
    world = a_world("workers", "it settles")
    world.change(own_gap="lacks status.restarts")

    world.operate()

    accepted = find(world.status.conditions, ConditionType.ACCEPTED)
    assert accepted is not None
    assert (accepted.status, accepted.reason) == ("True", Reason.DEFINITIONS_OUTDATED)
    assert world.status.phase == "Ready"
