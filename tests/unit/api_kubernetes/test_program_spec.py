"""Programs as the API server describes them to Kubernetes."""

import base64
from dataclasses import replace
from typing import Any

import pytest

from tinkercloud_api.providers.base import Placement
from tinkercloud_api.providers.cluster import program_spec
from tinkercloud_api.providers.cluster.session_spec import attached_model
from tinkercloud_api.providers.cluster.session_status import TrainingSessionView, read_session
from tinkercloud_api.providers.program_runner import ProgramLaunch
from tinkercloud_api.providers.session_options import SessionOptions
from tinkercloud_crds.pods.program_fields import ProgramStatus
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.spec.resolved import ResolvedSpec, resolve
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.programs.program_messages import API_KEY, ProgramPhase
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.resources.sessions import MODEL_NAME, NOON, PROGRAMS, Json, a_base_model

LAUNCH = ProgramLaunch(
    program_id="program-1",
    owner="ada",
    module="recipes.train",
    source=None,
    args=("--steps", "3"),
    model_id=None,
    environment={API_KEY: "tml-secret"},
)
FILE = replace(LAUNCH, module=None, source="print(1)")


def view(launch: ProgramLaunch, **status: Any) -> TrainingSessionView:
    manifest: Json = {**program_spec.training_session(launch, MODEL_NAME, NOON), "status": status}
    stored = {"uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T12:00:00Z"}
    manifest["metadata"] |= stored
    return read_session(manifest)


def test_the_session_of_a_program_is_accepted_by_its_base_model() -> None:
    manifest = program_spec.training_session(LAUNCH, MODEL_NAME, NOON)
    spec = TrainingSessionSpec.model_validate(manifest["spec"])

    assert isinstance(resolve(spec, a_base_model(programs=PROGRAMS), 0), ResolvedSpec)
    assert spec.program is not None
    assert (spec.program.id, spec.program.module) == ("program-1", "recipes.train")
    assert spec.program.args == ["--steps", "3"]
    assert spec.model_id is None
    assert len(manifest["metadata"]["name"]) <= 40


def test_the_secret_holds_key_and_source_under_the_names_in_the_spec() -> None:
    program = program_spec.program(FILE)
    secret = program_spec.secret(FILE, program.api_key_secret.name, "one", "uid-of-one")

    entries = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert program.source_secret is not None
    assert secret["metadata"]["name"] == program.source_secret.name
    wanted = {program.api_key_secret.key: "tml-secret", program.source_secret.key: "print(1)"}
    assert entries == wanted
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-of-one"


def test_the_key_is_in_no_other_object_and_not_in_the_name() -> None:
    manifest = program_spec.training_session(LAUNCH, MODEL_NAME, NOON)

    assert "tml-secret" not in str(manifest)
    another = replace(LAUNCH, environment={API_KEY: "tml-another"})
    assert program_spec.secret_name(another) != program_spec.secret_name(LAUNCH)


def test_a_patch_removes_the_fields_of_the_earlier_program() -> None:
    patch = program_spec.as_patch(program_spec.program(FILE))["spec"]["program"]

    assert patch["module"] is None
    assert patch["image"] is None
    assert patch["stop"] is False


def test_an_invalid_program_is_refused_with_the_field() -> None:
    with pytest.raises(InvalidRequest, match="args"):
        program_spec.program(replace(LAUNCH, args=("a" * 20000,)))


@pytest.mark.parametrize(
    ("status", "is_replaceable"),
    [
        ({}, False),
        ({"program": {"id": "program-1", "phase": "Running"}}, False),
        ({"program": {"id": "earlier", "phase": "Succeeded"}}, False),
        ({"program": {"id": "program-1", "phase": "Succeeded"}}, True),
        ({"program": {"id": "program-1", "phase": "Stopped"}}, True),
    ],
)
def test_a_program_is_replaced_only_after_its_end(
    status: dict[str, Any], is_replaceable: bool
) -> None:
    assert program_spec.is_replaceable(view(LAUNCH, **status)) == is_replaceable


def test_a_status_is_that_of_its_program_only() -> None:
    session = view(LAUNCH, program={"id": "program-1", "phase": "Failed", "exitCode": 2})

    assert program_spec.status_of(session, "another") is None
    found = program_spec.status_of(session, "program-1")
    assert found is not None
    assert program_spec.state_of(found).exit_code == 2


def test_states_have_the_times_of_the_status() -> None:
    at = "2026-01-01T12:00:00Z"
    status = ProgramStatus(phase="Stopped", start_time=at, finish_time=at, restarts=2)

    state = program_spec.state_of(status)

    assert (state.phase, state.restarts) == (ProgramPhase.STOPPED, 2)
    assert state.started_at == state.finished_at == NOON


def test_any_adapter_may_be_trained_in_the_session_of_a_program() -> None:
    options = SessionOptions(session="program-x")
    model = ModelSpec(owner="ada", lora=LoraConfig(rank=128, seed=1))
    placement = Placement("s:train:0", "ada", MODEL_NAME, model, options)

    assert attached_model(placement, view(LAUNCH)) == model
    with pytest.raises(InvalidRequest, match="baseModel"):
        attached_model(replace(placement, base_model="another"), view(LAUNCH))
