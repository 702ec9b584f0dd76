"""Rank groups: one order of commands, definite failures, no leftovers."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
from ray.util import placement_group_table

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.ranks.recorder import Recorder, cannot_load, never_ready
from tinkercloud_worker.actors.rank import Rank
from tinkercloud_worker.actors.rank_group import (
    GroupShape,
    GroupTimings,
    RankGroup,
    RanksLost,
    RanksUnavailable,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

TWO = GroupShape(ranks=2)


@pytest.fixture
def group(cluster: None) -> Iterator[RankGroup]:
    group = RankGroup(TWO, Recorder)
    yield group
    group.close()


def processes(group: RankGroup) -> list[psutil.Process]:
    ranks = [psutil.Process(pid) for pid in group.call_each("process", [(), ()])]
    assert set(ranks) <= set(rank_processes())
    return ranks


def rank_processes() -> list[psutil.Process]:
    """Return the ranks that run on this machine, of whatever group: Ray names them by class."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if command(process).startswith(f"ray::{Rank.__name__}")]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def assert_nothing_is_left(ended: Sequence[psutil.Process] = ()) -> None:
    _, alive = psutil.wait_procs([*ended, *rank_processes()], timeout=30)
    assert not alive
    assert not rank_processes()
    states = {entry["state"] for entry in placement_group_table().values()}
    assert states == {"REMOVED"}


def test_a_command_runs_on_all_ranks_together(group: RankGroup) -> None:
    assert group.call("add", 10) == 21.0
    assert group.call_each("add", [(1,), (5,)]) == [7.0, 7.0]


def test_commands_of_many_threads_reach_all_ranks_in_one_order(group: RankGroup) -> None:
    with ThreadPoolExecutor(8) as threads:
        sums = list(threads.map(lambda number: group.call("add", number), range(40)))

    assert sums == [2.0 * number + 1 for number in range(40)]
    first, second = group.call_each("history", [(), ()])
    assert sorted(first) == list(range(40))
    assert first == second


def test_ranks_wait_at_their_store_as_long_as_in_a_collective_operation(group: RankGroup) -> None:
    assert group.call_each("patience", [(), ()]) == [GroupTimings().collective] * 2


def test_ranks_wait_for_one_that_loads_as_long_as_it_may_load() -> None:
    group = RankGroup(TWO, Recorder, GroupTimings(start=7200, collective=60))

    assert group.call_each("patience", [(), ()]) == [7200] * 2
    group.close()


def test_a_rank_killed_during_a_command_fails_it_and_ends_the_group(
    group: RankGroup,
) -> None:
    ranks = processes(group)

    with pytest.raises(RanksLost, match="rank 1 of 2 failed in die_at: its process ended"):
        group.call("die_at", 1)

    assert not group.is_alive
    with pytest.raises(RanksLost, match="die_at"):
        group.call("add", 1)
    assert_nothing_is_left(ranks)


def test_a_rank_killed_between_commands_fails_the_next_one(group: RankGroup) -> None:
    ranks = processes(group)
    ranks[0].kill()
    ranks[0].wait(30)

    with pytest.raises(RanksLost, match="rank 0 of 2 failed in add"):
        group.call("add", 1)

    assert_nothing_is_left(ranks)


def test_an_error_on_one_rank_frees_those_that_wait_for_it(group: RankGroup) -> None:
    ranks = processes(group)

    with pytest.raises(RanksLost, match="rank 0 of 2 failed in fail_at: ArithmeticError: no such"):
        group.call("fail_at", 0)

    assert_nothing_is_left(ranks)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_surviving_rank_reports_its_models_before_it_is_killed_even_if_it_hangs(
    group: RankGroup, killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkercloud_worker.actors.failure_causes._ROOT_CAUSE_SECONDS", 3600.0)
    ranks = processes(group)
    group.call("add", 7)

    with pytest.raises(RanksLost, match="failed in hang_unless_killed"):
        group.call("hang_unless_killed", killed)

    assert group.salvaged == [7, 1 - killed]
    assert_nothing_is_left(ranks)


def test_surviving_ranks_finish_commands_that_need_no_other_rank(group: RankGroup) -> None:
    ranks = processes(group)

    assert group.call_independently("note", 7, 0) == 7

    assert not group.is_alive
    assert group.salvaged == [7, 1]
    assert_nothing_is_left(ranks)


def test_a_command_counts_as_done_if_other_ranks_have_done_it(
    group: RankGroup,
) -> None:
    assert group.call_independently("note_unless_failing", 7, 0) == 7

    assert not group.is_alive
    assert group.salvaged == [7, 1]


def test_ranks_that_all_fail_stay_alive_and_report_their_models(group: RankGroup) -> None:
    group.call("add", 5)

    with pytest.raises(RanksLost, match="rank 0 of 2 failed in note_unless_failing: Arithmetic"):
        group.call_independently("note_unless_failing", 7, 0, 1)

    assert group.salvaged == [5, 0]


def test_without_a_surviving_rank_a_command_is_not_done_and_nothing_is_reported(
    group: RankGroup,
) -> None:
    with pytest.raises(RanksLost, match="rank 0 of 2 failed in note: its process ended"):
        group.call_independently("note", 7, 0, 1)

    assert group.salvaged is None


def test_an_error_of_all_ranks_is_the_clients_and_keeps_the_group(
    group: RankGroup,
) -> None:
    with pytest.raises(InvalidRequest, match="must be even"):
        group.call("refuse")

    assert group.call("add", 1) == 3.0


def test_a_group_whose_ranks_disagree_ends(group: RankGroup) -> None:
    with pytest.raises(RanksLost, match="some ranks rejected refuse_at"):
        group.call("refuse_at", 1)

    assert not group.is_alive


def test_a_lost_group_frees_its_resources_for_another(group: RankGroup) -> None:
    with pytest.raises(RanksLost):
        group.call("die_at", 0)

    another = RankGroup(GroupShape(ranks=4), Recorder)

    assert another.call("add", 0) == 6.0
    another.close()


def test_insufficient_resources_are_reported_and_nothing_keeps_waiting() -> None:
    cores = ray.cluster_resources()["CPU"]

    with pytest.raises(
        RanksUnavailable, match=rf"insufficient capacity: 2 ranks .* of {cores:g} CPU"
    ) as error:
        RankGroup(GroupShape(ranks=2, cpus_per_rank=cores), Recorder, GroupTimings(start=1))

    assert "reduce the number or size of ranks" in str(error.value)
    assert "trainer.startTimeoutSeconds" in str(error.value)
    assert_nothing_is_left()


def test_a_rank_that_takes_too_long_to_load_times_out() -> None:
    late = r"ranks .* of 2 did not .* within 10 s; raise trainer\.start_timeout_seconds"
    with pytest.raises(RanksUnavailable, match=late):
        RankGroup(TWO, never_ready, GroupTimings(start=10))

    assert_nothing_is_left()


def test_a_rank_that_cannot_load_says_why() -> None:
    with pytest.raises(RanksUnavailable, match=r"failed to load: FileNotFoundError: .*safetensors"):
        RankGroup(TWO, cannot_load)

    assert_nothing_is_left()
