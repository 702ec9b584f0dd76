"""When a model is saved: never too late, never without a change, and less often while it fails."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker.head.model.save_schedule import Backoff, SaveSchedule, SnapshotSchedule

STEPS, SECONDS = 5, 100.0
CONFIG = AutosaveConfig(steps=STEPS, seconds=SECONDS)

PAUSES = st.lists(st.floats(0, 3 * SECONDS), max_size=60)
"""Seconds before each of a run's steps."""


def times(pauses: Sequence[float]) -> list[float]:
    """Return when each step ends."""
    total, ends = 0.0, []
    for pause in pauses:
        total += pause
        ends.append(total)
    return ends


@given(PAUSES)
def test_with_a_store_that_is_fast_a_run_is_never_further_behind_than_configured(
    pauses: Sequence[float],
) -> None:
    schedule = SaveSchedule(CONFIG)
    unsaved: list[float] = []
    saves = 0
    for now in times(pauses):
        # The timer fires between two steps.
        if (due := schedule.due_at()) is not None and due <= now:
            schedule.saved(schedule.begin(due))
            unsaved, saves = [], saves + 1
        assert all(now - step <= SECONDS for step in unsaved)
        schedule.changed(now)
        unsaved.append(now)
        if (due := schedule.due_at()) is not None and due <= now:
            schedule.saved(schedule.begin(now))
            unsaved, saves = [], saves + 1
        assert schedule.unsaved == len(unsaved) < STEPS
    assert saves <= len(pauses)


@given(st.lists(st.sampled_from(["step", "copy", "stored", "failed"]), max_size=80))
def test_a_step_counts_as_saved_only_if_it_ended_before_a_copy_that_was_stored(
    events: Sequence[str],
) -> None:
    schedule = SaveSchedule(CONFIG)
    steps = stored = 0
    copy = None
    for now, event in enumerate(events):
        if event == "step":
            schedule.changed(float(now))
            steps += 1
        elif event == "copy":
            copy = (steps, schedule.begin(float(now)))
        elif copy is not None and event == "stored":
            stored = max(stored, copy[0])
            schedule.saved(copy[1])
        elif copy is not None:
            schedule.failed(float(now), "the store is full")
        assert schedule.unsaved == steps - stored
        assert (schedule.due_at() is None) == (steps == stored)


def test_a_model_that_does_not_change_is_not_saved() -> None:
    schedule = SaveSchedule(CONFIG)
    assert schedule.due_at() is None

    schedule.changed(1.0)
    assert schedule.due_at() == 1.0 + SECONDS
    schedule.saved(schedule.begin(2.0))

    assert schedule.due_at() is None


def test_steps_that_end_while_a_copy_is_written_are_due_from_the_time_of_the_copy() -> None:
    schedule = SaveSchedule(CONFIG)
    schedule.changed(0.0)
    point = schedule.begin(50.0)
    schedule.changed(60.0)
    schedule.saved(point)

    assert schedule.unsaved == 1
    assert schedule.due_at() == 50.0 + SECONDS


def test_an_older_copy_that_is_stored_last_does_not_hide_newer_steps() -> None:
    schedule = SaveSchedule(CONFIG)
    schedule.changed(0.0)
    older = schedule.begin(1.0)
    schedule.changed(2.0)
    schedule.saved(schedule.begin(3.0))
    schedule.changed(4.0)

    schedule.saved(older)

    assert schedule.unsaved == 1


def test_pauses_after_failures_grow_to_a_limit_and_end_with_a_success() -> None:
    schedule = SaveSchedule(CONFIG)
    schedule.changed(0.0, STEPS)
    pauses = []
    for _ in range(9):
        schedule.failed(1000.0, "the store is full")
        due = schedule.due_at()
        assert due is not None
        pauses.append(due - 1000.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert schedule.failure == "the store is full"

    schedule.saved(schedule.begin(2000.0))
    schedule.changed(2001.0, STEPS)

    assert schedule.failure is None
    assert schedule.due_at() == 2001.0


@pytest.mark.parametrize(
    ("steps", "seconds", "due"),
    [(0, 100.0, 101.0), (50, 0.0, None), (0, 0.0, None), (1, 0.0, 1.0)],
)
def test_zero_switches_a_rule_off(steps: int, seconds: float, due: float | None) -> None:
    schedule = SaveSchedule(AutosaveConfig(steps=steps, seconds=seconds))
    schedule.changed(1.0)

    assert schedule.due_at() == due


def test_a_lost_model_is_not_saved() -> None:
    schedule = SaveSchedule(CONFIG)
    schedule.changed(1.0, STEPS)
    schedule.end()

    assert schedule.due_at() is None


@given(st.lists(st.floats(0.1, 10 * SECONDS), min_size=1, max_size=20))
def test_saves_take_no_more_than_their_share_of_the_time(durations: Sequence[float]) -> None:
    schedule = SaveSchedule(AutosaveConfig(steps=1, seconds=0), share=0.05)
    now = taken = 0.0
    for took in durations:
        schedule.changed(now)
        due = schedule.due_at()
        assert due is not None
        now = max(now, due)
        assert taken <= 0.05 * now * (1 + 1e-9)
        point = schedule.begin(now)
        schedule.rest(now, now + took)
        now, taken = now + took, taken + took
        schedule.saved(point)


def test_an_attempt_that_fails_late_is_repeated_after_as_long_a_pause() -> None:
    backoff = Backoff()
    backoff.failed(1000.0, took=300.0)
    assert backoff.retry_at == 1300.0


LORA = LoraConfig(rank=4)
QUIET = {"is_urgent": False, "needs_copy": False, "has_gradient": False}


def a_snapshot_schedule(lora: LoraConfig | None, *, is_wanted: bool = False) -> SnapshotSchedule:
    config = DurabilityConfig(snapshot_steps=STEPS, whole_model_seconds=SECONDS)
    return SnapshotSchedule(config, lora, is_wanted=is_wanted)


def test_a_snapshot_is_due_once_as_many_changes_as_configured_have_been_counted() -> None:
    schedule = a_snapshot_schedule(LORA)
    schedule.count(10.0, STEPS - 1)
    schedule.count(11.0, STEPS - 1)
    assert schedule.next_at(**QUIET) == 10.0 + DurabilityConfig().snapshot_seconds

    schedule.count(12.0, STEPS)

    assert schedule.next_at(**QUIET) == 10.0


@pytest.mark.parametrize("need", ["is_wanted", "is_urgent", "needs_copy"])
def test_a_snapshot_that_is_needed_waits_only_for_the_pause_after_a_failure(need: str) -> None:
    schedule = a_snapshot_schedule(LORA, is_wanted=need == "is_wanted")
    needs = {name: name == need or value for name, value in QUIET.items()}
    due = schedule.next_at(**needs)
    assert due is not None
    assert due <= 0

    schedule.attempt_failed(1000.0, 1000.5, "the disk is full")

    assert schedule.next_at(**needs) == 1001.5
    assert schedule.failure == "the disk is full"


def test_a_snapshot_that_could_not_be_copied_is_copied_after_a_pause_as_long_as_the_attempt() -> (
    None
):
    schedule = a_snapshot_schedule(LORA)
    schedule.copy_failed(1000.0, 1030.0)
    assert schedule.next_at(**QUIET) == 1060.0

    schedule.copied()

    assert schedule.next_at(**QUIET) is None


@pytest.mark.parametrize(("lora", "due"), [(None, None), (LORA, 1.0)])
def test_only_a_whole_model_waits_for_the_end_of_its_step(
    lora: LoraConfig | None, due: float | None
) -> None:
    schedule = a_snapshot_schedule(lora)
    schedule.count(1.0, STEPS)

    assert schedule.next_at(**{**QUIET, "has_gradient": True}) == due
    assert schedule.next_at(**QUIET) == (1.0 if lora is not None else 1.0 + SECONDS)


def test_an_attempt_for_a_whole_model_is_repeated_only_once_its_share_of_the_time_is_over() -> None:
    schedule = a_snapshot_schedule(None, is_wanted=True)

    schedule.attempt_failed(1000.0, 1002.0, "the disk is full")

    assert schedule.next_at(**QUIET) == 1040.0
