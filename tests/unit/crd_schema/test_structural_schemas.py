"""From models to structural schemas: bounded throughout, and nothing Kubernetes would refuse."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any

import pytest
from pydantic import ConfigDict, Field

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import ConditionType, Reason, moved
from tinkercloud_crds.generate import KINDS, MAX_BYTES, Kind, definition, render
from tinkercloud_crds.structural import Part, UnboundedError, rules, structural_schema
from tinkercloud_crds.training_session import TrainingSessionSpec, TrainingSessionStatus
from tinkercloud_testing.resources.sessions import (
    NOON,
    Json,
    a_base_model_manifest,
    a_session_manifest,
)

FORBIDDEN = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "title", "const"}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)


def nodes(schema: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield every part of a schema with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def schema_of(kind: Kind) -> Json:
    [version] = definition(kind)["spec"]["versions"]
    schema: Json = version["schema"]["openAPIV3Schema"]
    return schema


@every_kind
def test_a_schema_has_nothing_that_kubernetes_does_not_know(kind: Kind) -> None:
    strange = [path for path, node in nodes(schema_of(kind)) if node.keys() & FORBIDDEN]

    assert strange == []


@every_kind
def test_every_part_of_spec_and_status_is_described_and_has_a_type(kind: Kind) -> None:
    properties = schema_of(kind)["properties"]
    named = [
        (path, node)
        for part in ("spec", "status")
        for path, node in nodes(properties[part], part)
        if not path.endswith("[]")
    ]

    assert [path for path, node in named if not node.get("description")] == []
    assert [path for path, node in named if "type" not in node] == []


@every_kind
def test_a_status_is_never_filled_in(kind: Kind) -> None:
    status = schema_of(kind)["properties"]["status"]

    assert [path for path, node in nodes(status) if "default" in node] == []


@every_kind
def test_conditions_are_a_list_keyed_by_type(kind: Kind) -> None:
    conditions = schema_of(kind)["properties"]["status"]["properties"]["conditions"]

    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_a_definition_that_grows_too_large_is_not_written() -> None:
    class Grown(Part):
        text: Annotated[str, Field(max_length=1, description="x" * MAX_BYTES)] = ""

    kind = Kind(kind="Grown", plural="growns", short_name="g", spec=Grown, status=Part, columns=())
    with pytest.raises(ValueError, match=rf"the CRD of Grown has \d+ bytes, over {MAX_BYTES}"):
        render(kind)


class Inner(Part):
    text: str = ""


class Holder(Part):
    inner: Inner = Inner()


class Mapped(Part):
    labels: dict[str, Annotated[str, Field(max_length=1)]] = {}  # noqa: RUF012 - pydantic copies it


class Listed(Part):
    names: Annotated[list[Annotated[str, Field(max_length=1)]], Field(default_factory=list)]


@pytest.mark.parametrize(
    ("model", "path"),
    [(Inner, "Inner.text"), (Holder, "Holder.inner.text"), (Mapped, "labels"), (Listed, "names")],
)
def test_a_field_without_a_bound_is_refused_by_name(model: type[Part], path: str) -> None:
    with pytest.raises(UnboundedError, match=path):
        structural_schema(model)


class Ruled(Part):
    model_config = ConfigDict(json_schema_extra=rules(("self.size > 0", "size: too small")))

    size: Annotated[int, Field(gt=0, lt=9)] | None = None


class Ruling(Part):
    part: Annotated[Ruled, Field(json_schema_extra=rules(("self == oldSelf", "stays")))]


def test_rules_of_a_part_and_of_the_field_that_holds_it_are_both_kept() -> None:
    part = structural_schema(Ruling)["properties"]["part"]

    assert [rule["message"] for rule in part["x-kubernetes-validations"]] == [
        "size: too small",
        "stays",
    ]


def test_exclusive_bounds_are_written_as_openapi_3_0_has_them() -> None:
    size = structural_schema(Ruled)["properties"]["size"]

    assert size == {
        "type": "integer",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 9,
        "exclusiveMaximum": True,
    }


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        (BaseModelSpec, a_base_model_manifest()["spec"]),
        (TrainingSessionSpec, a_session_manifest()["spec"]),
    ],
)
def test_fields_of_a_later_version_are_ignored_when_reading(model: type[Part], spec: Json) -> None:
    assert model.model_validate(spec | {"fromTheFuture": 1}) == model.model_validate(spec)


def test_a_status_survives_being_written_and_read() -> None:
    status = TrainingSessionStatus(phase="Ready", gpus=3, conditions=[a_condition("True")])

    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)

    assert TrainingSessionStatus.model_validate(written) == status
    assert "endpoint" not in written


def a_condition(status: Any, seconds: float = 0, before: Any = ()) -> Any:
    return moved(
        before,
        ConditionType.READY,
        status,
        Reason.READY,
        "m" * 2000,
        generation=1,
        now=NOON + timedelta(seconds=seconds),
    )


def test_a_transition_time_moves_with_the_status_and_not_otherwise() -> None:
    first = a_condition("False")

    same, other = a_condition("False", 60, [first]), a_condition("True", 60, [first])

    assert first.last_transition_time == "2026-01-01T12:00:00Z"
    assert same.last_transition_time == "2026-01-01T12:00:00Z"
    assert other.last_transition_time == "2026-01-01T12:01:00Z"
    assert len(first.message) == 1024


def test_generated_definitions_are_fresh() -> None:
    subprocess.run([sys.executable, "-m", "tinkercloud_crds.generate", "--check"], check=True)
