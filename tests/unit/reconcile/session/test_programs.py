"""A session's program: when its Job exists, and what its status says."""

import dataclasses

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_crds.pods.program_fields import Program, ProgramStatus
from tinkercloud_operator.decide.read import parsing
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.spec.observed import ChildKey
from tinkercloud_testing.resources.session_world import JOB, RAY_CLUSTER, SETTINGS, World, a_world
from tinkercloud_testing.resources.sessions import (
    PROGRAM,
    Json,
    a_base_model,
    a_session,
    a_session_manifest,
    observed,
    snapshot,
)

POLICY = ChildKey("NetworkPolicy", "one-program")
LOOKS = ["the operator reconciles"] * 2


def program(world: World) -> ProgramStatus:
    found = world.status.program
    assert found is not None
    return found


def test_a_program_waits_until_its_session_is_ready() -> None:
    world = a_world("program", "the operator reconciles", "KubeRay works", *LOOKS)

    assert JOB not in world.children
    assert program(world) == ProgramStatus(message="waiting for the session to be Ready")
    world.settle()
    assert {JOB, POLICY} <= world.children.keys()
    assert program(world).phase == "Running"
    assert program(world).job == "one-program"


@pytest.mark.parametrize(
    ("event", "phase", "job", "policy"),
    [
        ("its owner stops the program", "Stopped", False, False),
        ("its owner suspends it", "Pending", False, False),
        ("a node is cordoned", "Running", True, True),
        ("the head is lost", "Running", True, True),
        ("the Job is deleted", "Running", True, True),
        ("the BaseModel is deleted", "Running", True, True),
        ("the program crashes", "Running", True, True),
        ("the program succeeds", "Succeeded", True, True),
        ("half an hour passes", "Running", True, True),
        ("a day passes", "Running", True, True),
    ],
)
def test_what_happens_to_a_running_program(event: str, phase: str, job: bool, policy: bool) -> None:
    world = a_world("program", "it settles", event, "it settles")

    assert program(world).phase == phase
    assert (JOB in world.children, POLICY in world.children) == (job, policy)


def test_a_crash_is_counted_and_shown_while_the_program_is_restarted() -> None:
    world = a_world("program", "it settles", "the program crashes", "it settles")

    assert program(world).restarts == 1
    assert program(world).message == "exit code 1: it broke"
    assert program(world).exit_code == 1


def test_a_program_that_fails_too_often_has_failed_for_good() -> None:
    crash = ["the program crashes", "it settles"]
    world = a_world("program", "it settles", *crash * 3)

    assert program(world).phase == "Failed"
    assert program(world).restarts == 2
    assert "exit code 1: it broke" in (program(world).message or "")
    world.happen("the Job is deleted", "it settles")
    assert JOB not in world.children
    assert program(world).phase == "Failed"


def test_a_stopped_program_starts_again_in_another_job() -> None:
    world = a_world("program", "it settles", "its owner stops the program", "it settles")
    assert program(world).finish_time is not None

    world.happen("its owner starts the program", "it settles")

    assert JOB in world.children
    assert program(world).phase == "Running"
    assert program(world).finish_time is None


def test_the_pod_of_a_deleted_job_ends_before_the_next_one_starts() -> None:
    world = a_world("program", "it settles", "the Job is deleted", *LOOKS)

    assert JOB not in world.children
    world.happen("the program starts", *LOOKS)
    assert JOB in world.children


def test_another_id_replaces_a_program_that_has_ended() -> None:
    world = a_world("program", "it settles", "the program succeeds", "it settles")
    changed = Program.model_validate(PROGRAM | {"id": "another"})

    world.change(spec=world.known.session.spec.model_copy(update={"program": changed}))
    world.settle()

    assert program(world).id == "another"
    assert program(world).phase == "Running"


def test_a_removed_program_leaves_nothing() -> None:
    world = a_world("program", "it settles")

    world.change(spec=world.known.session.spec.model_copy(update={"program": None}))
    world.settle()

    assert world.status.program is None
    assert not {JOB, POLICY} & world.children.keys()


def test_a_session_is_idle_only_after_its_program_has_ended() -> None:
    world = a_world("program", "it settles", "a day passes", "it settles")
    assert RAY_CLUSTER in world.children

    world.happen("the program succeeds", "it settles")
    assert RAY_CLUSTER in world.children
    world.happen("half an hour passes", "it settles")

    assert world.status.phase == "Suspended"
    assert JOB in world.children, "its output can still be read"


def test_a_program_that_cannot_start_does_not_keep_its_session() -> None:
    world = a_world("program", "it settles", "its owner stops the program", "it settles")
    waiting: Json = {"is_running": False, "waits": "container program: no such image"}
    world.happen("its owner starts the program", *LOOKS, "the program starts")
    world.program_pods = [dataclasses.replace(pod, **waiting) for pod in world.program_pods]
    world.happen("the operator reconciles")

    assert program(world).phase == "Pending"
    assert program(world).message == "container program: no such image"
    world.happen("half an hour passes", "the operator reconciles")
    suspended = find(world.status.conditions, ConditionType.SUSPENDED)
    assert suspended is not None
    assert suspended.status != "False"


def test_a_deleted_session_ends_its_program_before_the_last_checkpoint() -> None:
    world = a_world("program", "it settles", "it is deleted", "the operator reconciles")

    assert not world.is_gone
    assert JOB not in world.children


@pytest.mark.parametrize(
    ("offer", "asked", "settings", "says"),
    [
        (None, {}, {}, "spec.program: the BaseModel allows no programs; set its spec.programs"),
        ({"images": ["a"]}, {"image": "b"}, {}, "'b' is not allowed by the BaseModel"),
        ({"images": ["a"]}, {}, {"api_url": None}, "set TINKERCLOUD_OPERATOR_API_URL"),
    ],
)
def test_a_session_with_a_program_that_cannot_run_is_refused(
    offer: object, asked: Json, settings: Json, says: str
) -> None:
    snapshot = observed(
        base_model=a_base_model(programs=offer), spec=a_session(program=PROGRAM | asked)
    )

    plan = reconcile(snapshot, SETTINGS.model_copy(update=settings))

    assert plan.status is not None
    accepted = find(plan.status.conditions, ConditionType.ACCEPTED)
    assert accepted is not None
    assert accepted.reason == Reason.NOT_ALLOWED
    assert says in accepted.message


def a_pod_manifest(**status: object) -> Json:
    metadata = {
        "name": "one-program-x",
        "uid": "uid-of-x",
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-01T12:00:00Z",
        "labels": {labels.PROGRAM_LABEL: "one", labels.COMPONENT_LABEL: "program"},
    }
    return {"metadata": metadata, "spec": {}, "status": status}


@pytest.mark.parametrize(
    ("terminated", "failure", "exit_code"),
    [
        (
            {"exitCode": 1, "message": "Traceback:\nValueError: no"},
            "exit code 1: ValueError: no",
            1,
        ),
        ({"exitCode": 3}, "exit code 3", 3),
        ({"exitCode": 137, "reason": "OOMKilled"}, "it exceeded its memory limit", 137),
    ],
)
def test_a_failed_pod_says_how_it_failed(terminated: Json, failure: str, exit_code: int) -> None:
    states = [{"name": "program", "state": {"terminated": terminated}}]

    pod = parsing.program_pod(a_pod_manifest(phase="Failed", containerStatuses=states))

    assert (pod.is_ended, pod.failure, pod.exit_code) == (True, failure, exit_code)


def test_an_evicted_pod_says_so() -> None:
    pod = parsing.program_pod(
        a_pod_manifest(phase="Failed", reason="Evicted", message="the node was low on memory")
    )

    assert pod.failure == "Evicted: the node was low on memory"


def test_a_pod_without_an_image_waits() -> None:
    waiting = {"reason": "ErrImagePull", "message": "no such image"}
    states = [{"name": "program", "state": {"waiting": waiting}}]

    pod = parsing.program_pod(a_pod_manifest(phase="Pending", containerStatuses=states))

    assert pod.waits == "container program: no such image"
    assert (pod.is_running, pod.is_ended, pod.failure) == (False, False, None)


def test_pods_of_programs_are_no_pods_of_their_session() -> None:
    session = a_session_manifest("one")
    session["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    session["metadata"]["creationTimestamp"] = "2026-01-01T12:00:00Z"
    watched = Watched()
    watched.note("TrainingSession", session)
    running = [{"name": "program", "state": {"running": {}}}]

    concerned = watched.note("Pod", a_pod_manifest(phase="Running", containerStatuses=running))

    seen = snapshot(watched)
    assert concerned == {"one"}
    assert seen is not None
    assert (seen.pods.required, len(seen.pods.of_program), seen.has_pods) == ((), 1, False)
    watched.replace("Pod", [], version=9)
    seen = snapshot(watched)
    assert seen is not None
    assert seen.pods.of_program == ()
