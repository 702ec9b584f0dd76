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
        **fields,
    }


def shown(width: int, run: dict[str, Any]) -> list[str]:
    """Return the lines of the table of runs: its columns, and the run."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(Group(*_tables(Seen([], [], [run]), width)))
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
