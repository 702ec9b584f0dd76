"""Admission to the KV cache: within the memory budget, and without starvation."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import Engine, a_sampling_request, an_engine, held
from tinkercloud_testing.training.recording import Operations
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, StopRules
from tinkercloud_worker.torch_sampler.decode.captured_steps import GraphCapturer
from tinkercloud_worker.torch_sampler.decode.kv_cache import KvShape, LayerKeyValues, SlotCache

NEVER = StopRules(frozenset(), ())
GRAPH_CAPTURERS: dict[str, Callable[[], GraphCapturer | None]] = {
    "computed": lambda: None,
    "recorded": Operations,
}


def a_request(prompt: int, drawn: int, seed: int = 0, num_samples: int = 1) -> SamplingRequest:
    """Return a request of a prompt of its own, of so many tokens."""
    tokens = [(seed * 7 + position * position) % 250 for position in range(prompt)]
    return a_sampling_request(
        tokens, max_tokens=drawn, seed=seed, num_samples=num_samples, stop=NEVER
    )


class Watched:
    """An engine whose steps a test does itself, to see what memory each leaves in use."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.most_slots = 0
        """Positions that slots took together at any time."""
        self.most_prompts = 0
        """Tokens of prompts whose keys and values were held at any time."""
        self.ended: list[int] = []
        """Requests in the order of their ends."""

    async def sample(self, requests: Sequence[SamplingRequest]) -> list[list[list[int]]]:
        """Ask all at once; return the tokens of each sample."""
        async with held(self.engine):
            asked = [asyncio.create_task(self._one(n, each)) for n, each in enumerate(requests)]
            await asyncio.sleep(0)
            while self.engine.sampler.has_work():
                self.engine.sampler.step()
                self._look()
                # For what has ended meanwhile.
                await asyncio.sleep(0)
        return await asyncio.gather(*asked)

    async def _one(self, number: int, request: SamplingRequest) -> list[list[int]]:
        result = await self.engine.sampler.sample("base", request)
        self.ended.append(number)
        return [list(sequence.tokens) for sequence in result.sequences]

    def _look(self) -> None:
        sampler = self.engine.sampler
        slots = sum(batch._cache.shape.tokens for batch in sampler._batches._by_weights.values())
        prompts = sum(
            job.prefilled for job in sampler._jobs if job.key_values or job.cache is not None
        )
        self.most_slots = max(self.most_slots, slots)
        self.most_prompts = max(self.most_prompts, prompts)


async def watched(
    folder: Path, config: SamplerConfig, requests: Sequence[SamplingRequest], kind: str
) -> tuple[Watched, list[list[list[int]]]]:
    """Sample from a base model; return what was seen of it and the tokens."""
    with an_engine(tiny_llama(), folder, config, graph_capturer=GRAPH_CAPTURERS[kind]()) as engine:
        await engine.sampler.publish("base", None)
        seen = Watched(engine)
        return seen, await seen.sample(requests)


@pytest.mark.parametrize("kind", GRAPH_CAPTURERS)
async def test_prompts_are_prefilled_only_while_waiting_prompts_fit(
    kind: str, tmp_path: Path
) -> None:
    requests = [a_request(60, 20, seed) for seed in range(40)]
    config = SamplerConfig(
        prefill_chunk_tokens=512, max_cached_tokens=1200, max_running_sequences=4
    )

    seen, drawn = await watched(tmp_path, config, requests, kind)

    assert [len(tokens) for (tokens,) in drawn] == [20] * 40
    assert 60 < seen.most_prompts <= 1200 // 4
    assert seen.most_slots <= 1200


async def test_a_prompt_longer_than_the_waiting_budget_uses_memory_of_sequences(
    tmp_path: Path,
) -> None:
    requests = [a_request(5, 60), a_request(300, 20), a_request(5, 60), a_request(390, 10)]

    seen, drawn = await watched(
        tmp_path, SamplerConfig(max_cached_tokens=400), requests, "computed"
    )

    assert [len(tokens) for (tokens,) in drawn] == [60, 20, 60, 10]
    assert seen.ended == [0, 1, 2, 3]


async def test_a_partially_prefilled_prompt_continues_while_an_earlier_one_waits_for_memory(
    tmp_path: Path,
) -> None:
    # The second begins like the first, and waits for it while the third begins to be read.
    requests = [a_request(300, 5), a_request(320, 5), a_request(350, 5, 1)]
    config = SamplerConfig(prefill_chunk_tokens=400, max_cached_tokens=4 * 660)

    seen, drawn = await watched(tmp_path, config, requests, "recorded")

    assert [len(tokens) for (tokens,) in drawn] == [5] * 3
    assert seen.most_prompts <= 660


@pytest.mark.parametrize("kind", GRAPH_CAPTURERS)
async def test_slots_never_exceed_the_budget_as_sequences_join_and_leave(
    kind: str, tmp_path: Path
) -> None:
    # Many short ones make many slots; one that is left of them is there when long ones join.
    short = [a_request(8, 8 + 2 * seed, seed) for seed in range(16)]
    long = [a_request(60, 400, 20), a_request(50, 420, 21), a_request(300, 160, 22)]
    requests = [*short, *long, *short, a_request(9, 30, 23, num_samples=5)]
    config = SamplerConfig(max_cached_tokens=2048)

    seen, drawn = await watched(tmp_path / "watched", config, requests, kind)
    _, alone = await watched(
        tmp_path / "roomy", SamplerConfig(max_cached_tokens=1 << 17), requests, "computed"
    )

    assert 1024 < seen.most_slots <= 2048
    assert drawn == alone


async def test_short_requests_do_not_starve_a_long_one(
    tmp_path: Path,
) -> None:
    requests = [a_request(3, 10 + seed, seed) for seed in range(40)]
    requests[8] = a_request(3, 200, 8)

    seen, _ = await watched(tmp_path, SamplerConfig(max_cached_tokens=400), requests, "computed")

    assert set(seen.ended[:9]) == set(range(9))


async def test_samples_of_one_request_join_before_those_of_later_ones(tmp_path: Path) -> None:
    requests = [a_request(3, 10, 1, num_samples=6), a_request(3, 10, 2), a_request(3, 10, 3)]

    seen, _ = await watched(tmp_path, SamplerConfig(max_running_sequences=2), requests, "computed")

    assert seen.ended == [0, 1, 2]


async def test_a_request_for_one_token_needs_no_slot(tmp_path: Path) -> None:
    requests = [a_request(3, 300, 0), a_request(90, 1, 1), a_request(3, 300, 2)]

    seen, _ = await watched(tmp_path, SamplerConfig(max_cached_tokens=400), requests, "computed")

    assert seen.ended == [1, 0, 2]


def test_growing_slots_keep_their_contents_and_drop_unused_memory() -> None:
    cache = SlotCache(1)

    def a_part(number: int, length: int) -> tuple[LayerKeyValues, ...]:
        part = torch.full((1, length, 1), float(number))
        return (LayerKeyValues(part, part),)

    cache.max_tokens = 64
    for slot in range(8):
        cache.insert(slot, a_part(slot, 8), 8)
    assert cache.shape == KvShape(8, 8)

    cache.max_tokens = 60
    cache.make_room(2, 9)

    assert cache.shape == KvShape(3, 16)
    keys = cache._own[0].keys
    assert keys is not None
    assert keys[0, 0, :8, 0].tolist() == [0.0] * 8
    assert keys[1, 0, :8, 0].tolist() == [1.0] * 8


def test_slots_grow_by_doubling_up_to_the_budget() -> None:
    shape = KvShape(2, 16)

    assert shape.grown(2, 16, 0) == shape
    assert shape.grown(3, 16, 1000) == KvShape(4, 16)
    assert shape.grown(2, 17, 1000) == KvShape(2, 32)
    assert shape.grown(3, 17, 100) == KvShape(3, 32)
    assert shape.grown(2, 17, 40) == KvShape(2, 20)
    assert shape.grown(2, 17, 10) == KvShape(2, 17)
