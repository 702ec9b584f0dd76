"""What `tinkercloud top` shows in terminals of different widths."""

from typing import Any

import pytest
from rich.console import Console, Group

from tinkercloud_api.commands.runs.top_command import Seen, _tables

RUN = "0f8e2a64-7d1b-4c55-9a3e-6b1f0c2d7e91:train:12"


def a_run(**fields: Any) -> dict[str, Any]:
    return {
        "run_id": RUN,
        "name": "preferences of the second round",
        "owner": "ann@example.com",
        "base_model": "Qwen/Qwen3-235B-A22B-Instruct",
        "state": "dedicated",
        "step": 123_456,
        "tokens_per_minute": 1e6,
        "loss": {"mean": 1.2345, "low": 1.0, "high": 2.0, "not_finite": 0},
        "last_seen_at": "2026-11-29T13:00:00Z",
        "queue_state": "paused_capacity",
        "queue_reason": "the quota of ann has no memory left",
        "cluster": "pool-0",
        **fields,
    }


def shown(width: int, run: dict[str, Any]) -> list[str]:
    """Return the lines of the table of runs: its columns, and the run."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(Group(*_tables(Seen([], [], [run]), width, 40)))
    return capture.get().splitlines()[-2:]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (80, "run state step loss"),
        (100, "run owner state step loss waits for"),
        (150, "run name owner model state step tokens/min loss last seen waits for"),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_and_whole_ids(width: int, columns: str) -> None:
    heads, run = shown(width, a_run())

    assert heads.split() == columns.split()
    assert {RUN, "dedicated", "123456", "1.2345"} <= set(run.split())


def test_an_id_is_whole_even_where_not_all_columns_fit() -> None:
    assert shown(60, a_run())[1].split()[:2] == [RUN, "dedicated"]


def test_names_of_others_cannot_control_the_terminal() -> None:
    _, run = shown(200, a_run(name="a\x1b[2J\x9bb"))

    assert "a�[2J�b" in run


def a_cluster(number: int) -> dict[str, Any]:
    return {
        "name": f"pool-{number}",
        "state": "Ready",
        "slots": 8,
        "models": 3,
        "gpus": 4,
        "idle_since": None,
        "idle_gpu_hours": 1.5,
        "memory_bytes": 3 << 20,
        "free_bytes": None,
    }


def screen(height: int, num_clusters: int, num_problems: int) -> list[str]:
    """Return the lines of a screen of a server with so many clusters and problems, and a run."""
    pool = {"by_cluster": [a_cluster(number) for number in range(num_clusters)]}
    model = {"model_name": "tiny", "runs": 1, "state": None, "pool": pool}
    failing = {"kind": "run", "reason": "its disk is full", "remedy": "free some space"}
    problems = [failing | {"subject": f"s:train:{number}"} for number in range(num_problems)]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(Group(*_tables(Seen([model], problems, [a_run()]), 200, height)))
    return capture.get().splitlines()


def test_clusters_and_problems_are_above_the_runs() -> None:
    lines = screen(40, num_clusters=1, num_problems=1)

    found = [line.split() for line in lines]
    assert ["pool-0", "Ready", "3", "of", "8", "3.0", "MiB", "4", "1.5"] in found
    assert ["run", "s:train:0", "its", "disk", "is", "full", "free", "some", "space"] in found
    assert lines[-1].split()[0] == RUN


def test_many_clusters_and_problems_leave_room_for_runs() -> None:
    lines = screen(24, num_clusters=50, num_problems=50)

    assert [line.strip() for line in lines if "more" in line] == ["and 44 more"] * 2
    assert len(lines) <= 24
    assert lines[-1].split()[0] == RUN


def test_a_server_without_pools_and_problems_has_no_tables_of_them() -> None:
    assert not [line for line in shown_all([]) if "slots" in line or "remedy" in line]


def shown_all(models: list[dict[str, Any]]) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(Group(*_tables(Seen(models, [], [a_run()]), 200, 40)))
    return capture.get().splitlines()
