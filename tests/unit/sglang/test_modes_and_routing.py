"""How requests are spread over servers, and how modes of a server exclude each other."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tinkercloud_protocol.heads.launch import InferenceConfig, SamplerConfig
from tinkercloud_worker.inference.routing import choose, order
from tinkercloud_worker.inference.server_modes import ModeSwitch

SERVERS = dict.fromkeys(["a", "b", "c", "d"], 0)


class Switches:
    """Records the switches."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.fails = False

    async def __call__(self, mode: str) -> None:
        await asyncio.sleep(0)
        self.made.append(mode)
        if self.fails:
            raise ValueError(f"can't switch to {mode}")


async def work(modes: ModeSwitch, mode: str, log: list[str], steps: int = 3) -> None:
    async with modes.use(mode):
        for _ in range(steps):
            log.append(mode)
            await asyncio.sleep(0)


@given(st.text())
def test_removing_a_server_only_moves_its_keys(key: str) -> None:
    ranked = order(key, SERVERS)
    left = {server: 0 for server in SERVERS if server != ranked[1]}

    assert sorted(ranked) == sorted(SERVERS)
    assert order(key, left) == [ranked[0], *ranked[2:]]


def test_keys_are_spread_over_all_servers() -> None:
    chosen = [choose(f"s:sample:{number}", SERVERS) for number in range(200)]

    assert all(chosen.count(server) > 25 for server in SERVERS)


@given(st.text(), st.lists(st.integers(0, 500), min_size=4, max_size=4))
def test_no_server_exceeds_its_share_by_more_than_a_quarter(key: str, loads: list[int]) -> None:
    running = dict(zip(SERVERS, loads, strict=True))

    chosen = choose(key, running)

    assert running[chosen] < max(1.25 * (sum(loads) + 1) / 4 + 1, 8)
    assert choose(key, SERVERS) == order(key, SERVERS)[0]


async def test_work_in_one_mode_runs_concurrently_without_a_switch() -> None:
    switches = Switches()
    log: list[str] = []
    modes = ModeSwitch(switches, "a")

    await asyncio.gather(*[work(modes, "a", log) for _ in range(3)])

    assert switches.made == []
    assert log == ["a"] * 9


async def test_modes_exclude_each_other_in_order_of_arrival() -> None:
    switches = Switches()
    log: list[str] = []
    modes = ModeSwitch(switches, "a")

    await asyncio.gather(*[work(modes, mode, log) for mode in ["a", "b", "b", "a", "c"]])

    assert "".join(log) == "aaabbbbbbaaaccc"
    assert switches.made == ["b", "a", "c"]


async def test_alternating_requests_cause_one_switch_per_mode() -> None:
    switches = Switches()
    log: list[str] = []
    modes = ModeSwitch(switches, None)

    await asyncio.gather(*[work(modes, mode, log) for mode in "ab" * 8])

    assert switches.made == ["a", "b"]
    assert "".join(log) == "a" * 24 + "b" * 24


async def test_work_for_the_current_mode_waits_behind_waiting_modes() -> None:
    switches = Switches()
    log: list[str] = []
    modes = ModeSwitch(switches, "a")
    async with modes.use("a"):
        waiting = [asyncio.create_task(work(modes, mode, log)) for mode in "bcb"]
        await asyncio.sleep(0)
        late = asyncio.create_task(work(modes, "a", log))
        await asyncio.sleep(0)
        assert log == []

    await asyncio.gather(*waiting, late)

    assert "".join(log) == "bbbbbbcccaaa"
    assert switches.made == ["b", "c", "a"]


async def test_a_failed_switch_fails_its_waiters_and_is_retried() -> None:
    switches = Switches()
    log: list[str] = []
    modes = ModeSwitch(switches, "a")
    switches.fails = True

    results = await asyncio.gather(
        *[work(modes, "b", log) for _ in range(2)], return_exceptions=True
    )
    switches.fails = False
    await work(modes, "b", log)

    assert [str(result) for result in results] == ["can't switch to b"] * 2
    assert log == ["b"] * 3
    assert switches.made == ["b", "b"]


@pytest.mark.parametrize("pauses", range(6))
async def test_cancelled_work_never_blocks_others(pauses: int) -> None:
    switches = Switches()
    log: list[str] = []
    modes = ModeSwitch(switches, "a")
    first = asyncio.create_task(work(modes, "a", log))
    cancelled = asyncio.create_task(work(modes, "b", [], steps=50))
    last = asyncio.create_task(work(modes, "a", log))
    for _ in range(pauses):
        await asyncio.sleep(0)

    cancelled.cancel()
    await asyncio.wait_for(asyncio.gather(first, last), 10)

    assert log == ["a"] * 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inference": InferenceConfig(urls=("http://a",))}, "backend torch uses no servers"),
        ({"backend": "sglang"}, "inference.urls"),
        (
            {"backend": "sglang", "inference": InferenceConfig(kind="vllm", urls=("http://a",))},
            "inference.kind",
        ),
        (
            {
                "backend": "external",
                "inference": InferenceConfig(urls=("http://a",), colocated=True),
            },
            "inference.colocated",
        ),
        (
            {
                "backend": "external",
                "inference": InferenceConfig(kind="vllm", urls=("http://a",), adapters_seen=False),
            },
            "inference.adapters_seen",
        ),
        (
            {
                "backend": "external",
                "inference": InferenceConfig(urls=("http://a",), process_group="gloo"),
            },
            "inference.process_group",
        ),
        (
            {
                "backend": "sglang",
                "inference": InferenceConfig(
                    urls=("http://a",), process_group="nccl", colocated=True
                ),
            },
            "inference.process_group",
        ),
    ],
)
def test_settings_without_effect_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SamplerConfig(**settings)
