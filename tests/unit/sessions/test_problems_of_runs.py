"""What needs attention of a run, and what does not."""

from collections.abc import Collection
from datetime import timedelta

import pytest

from tinkercloud_api.catalog.schema.tables import TrainingRun, now
from tinkercloud_api.heads.run_states import HEAD_IS_SILENT, Whereabouts
from tinkercloud_api.routes.sessions.problem_routes import of_run
from tinkercloud_api.runs.first_seen import FirstSeen
from tinkercloud_protocol.heads.launch import HeldModel
from tinkercloud_protocol.responses.problems import Problem

NOW = now()
RUN = TrainingRun(
    id="s:train:0", owner="me", base_model="m", generation="g", created_at=NOW, last_request_at=NOW
)
FULL = Whereabouts("waiting", queue_state="paused_capacity", queue_reason="no room for it")


def problems(
    run: TrainingRun, place: Whereabouts, loading: Collection[str] = (), explained: str = ""
) -> list[Problem]:
    return list(of_run(run, place, loading, {explained}, NOW))


def test_a_run_that_waits_for_room_is_a_problem_and_one_whose_model_loads_is_not() -> None:
    (problem,) = problems(RUN, FULL, loading=())

    assert (problem.subject, problem.reason) == ("s:train:0", "no room for it")
    assert problem.remedy == (
        "end a run that nobody needs (tinkercloud runs stop), or raise the limit or the memory that"
        " the reason names"
    )
    assert (problems(RUN, FULL, loading={"m"})) == []


@pytest.mark.parametrize("state", ["live", "suspended", "on disk", "ended"])
def test_a_run_that_is_well_is_no_problem(state: str) -> None:
    place = Whereabouts(state, held=HeldModel(model_id=RUN.id))  # type: ignore[arg-type]

    assert (problems(RUN, place, loading=())) == []


def test_a_lost_run_and_one_that_is_not_safe_say_what_to_do() -> None:
    held = HeldModel(model_id=RUN.id, degraded="the disk is full", autosave_failure="no space")

    (lost,) = problems(RUN, Whereabouts("lost", reason="its head stopped"), loading={"m"})
    unsafe = problems(RUN, Whereabouts("live", held=held), loading=())

    assert (lost.reason, "runs attach s:train:0" in lost.remedy) == ("its head stopped", True)
    assert [each.reason for each in unsafe] == [
        "a kill of its head would lose steps: the disk is full",
        "it has no automatic checkpoint: no space",
    ]


def test_each_of_two_problems_with_one_remedy_has_its_own_start() -> None:
    def live(**failures: str) -> Whereabouts:
        return Whereabouts("live", held=HeldModel.model_validate({"model_id": RUN.id, **failures}))

    seen, later = FirstSeen(), NOW + timedelta(minutes=5)
    seen.dated(problems(RUN, live(autosave_failure="no space")), NOW)
    found = seen.dated(
        problems(RUN, live(autosave_failure="no space", degraded="the disk is full")), later
    )

    assert [(each.since, each.reason.partition(":")[0]) for each in found] == [
        (later, "a kill of its head would lose steps"),
        (NOW, "it has no automatic checkpoint"),
    ]
    assert "cause" not in found[0].model_dump()


def test_a_run_that_its_head_saves_at_its_end_is_no_problem() -> None:
    held = HeldModel(model_id=RUN.id, degraded="the disk is full", unsaved_steps=3)

    assert problems(RUN, Whereabouts("ending", "its session is deleted", held=held)) == []


def test_a_run_whose_session_says_what_it_waits_for_is_no_second_problem() -> None:
    assert problems(RUN, FULL, explained=RUN.id) == []


def test_a_run_without_a_model_waits_since_it_was_created() -> None:
    new = TrainingRun(id="new", owner="me", base_model="m", created_at=NOW, last_request_at=NOW)

    assert [each.since for each in problems(new, FULL)] == [NOW]


def test_a_run_whose_requests_make_no_progress_is_stuck_and_one_that_computes_is_not() -> None:
    def held(**values: float) -> Whereabouts:
        model = HeldModel.model_validate({"model_id": RUN.id, **values})
        return Whereabouts("live", None, "waiting", "earlier requests run first", held=model)

    (stuck,) = problems(RUN, held(waiting_seconds=720))

    assert stuck.reason == (
        "it is stuck: for 12 minutes no request has finished, although some wait (earlier requests"
        " run first)"
    )
    assert "tinkercloud runs timeline s:train:0" in stuck.remedy
    assert stuck.since == NOW - timedelta(minutes=12)
    assert problems(RUN, held(waiting_seconds=720, tokens_per_minute=1.0)) == []
    assert problems(RUN, held(waiting_seconds=60)) == []


def test_a_request_that_runs_for_long_is_a_problem_only_after_an_hour() -> None:
    def held(minutes: int) -> Whereabouts:
        model = HeldModel(model_id=RUN.id, waiting_seconds=60 * minutes)
        return Whereabouts("live", None, "running", held=model)

    (slow,) = problems(RUN, held(minutes=60))

    assert slow.reason == "it may be stuck: its request has run for 60 minutes"
    assert slow.remedy.startswith("wait if a large model is being saved or loaded")
    assert slow.since == NOW - timedelta(hours=1)
    assert problems(RUN, held(minutes=59)) == []


def test_a_head_that_says_nothing_is_a_problem_of_its_runs() -> None:
    (silent,) = problems(RUN, Whereabouts("live", HEAD_IS_SILENT))

    assert "kill the process of the head" in silent.remedy
