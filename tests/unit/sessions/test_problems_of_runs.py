"""What needs attention of a run, and what does not."""

import pytest

from tinkercloud_api.catalog.schema.tables import TrainingRun, now
from tinkercloud_api.heads.run_states import Whereabouts
from tinkercloud_api.routes.sessions.problem_routes import of_run
from tinkercloud_protocol.heads.launch import HeldModel

RUN = TrainingRun(id="s:train:0", owner="me", base_model="m", last_request_at=now())
FULL = Whereabouts("waiting", queue_state="paused_capacity", queue_reason="no room for it")


def test_a_run_that_waits_for_room_is_a_problem_and_one_whose_model_loads_is_not() -> None:
    (problem,) = of_run(RUN, FULL, loading=())

    assert (problem.subject, problem.reason) == ("s:train:0", "no room for it")
    assert problem.remedy == (
        "end a run that nobody needs (tinkercloud runs stop), or raise the limit or the memory that"
        " the reason names"
    )
    assert list(of_run(RUN, FULL, loading={"m"})) == []


@pytest.mark.parametrize("state", ["live", "suspended", "on disk", "ended"])
def test_a_run_that_is_well_is_no_problem(state: str) -> None:
    place = Whereabouts(state, held=HeldModel(model_id=RUN.id))  # type: ignore[arg-type]

    assert list(of_run(RUN, place, loading=())) == []


def test_a_lost_run_and_one_that_is_not_safe_say_what_to_do() -> None:
    held = HeldModel(model_id=RUN.id, degraded="the disk is full", autosave_failure="no space")

    (lost,) = of_run(RUN, Whereabouts("lost", reason="its head stopped"), loading={"m"})
    unsafe = list(of_run(RUN, Whereabouts("live", held=held), loading=()))

    assert (lost.reason, "runs attach s:train:0" in lost.remedy) == ("its head stopped", True)
    assert [each.reason for each in unsafe] == [
        "a kill of its head would lose steps: the disk is full",
        "it has no automatic checkpoint: no space",
    ]
