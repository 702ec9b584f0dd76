"""Requests of several owners in one sampler: a failure stays with its own, and turns are fair."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_testing.small_models.models import in_dtype, tiny_llama
from tinkercloud_testing.training.engines import (
    Engine,
    a_sampling_request,
    an_engine,
    held,
    publish_adapter,
)
from tinkercloud_testing.training.trainers import base_of
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.sampling.sampler_interface import (
    SamplingRequest,
    SamplingResult,
    StopRules,
)
from tinkercloud_worker.engine.turns.usage_counts import Payer
from tinkercloud_worker.lora.segments import WeightSegment
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.decoding import RunningSequence, TokenSampler
from tinkercloud_worker.torch_sampler.decode.token_choice import sample_tokens

NEVER = StopRules(frozenset(), ())
Asked = tuple[str, SamplingRequest]
Answer = SamplingResult | BaseException


def a_request(
    seed: int, owner: str = "", *, top_k: int = 0, max_tokens: int = 6
) -> SamplingRequest:
    prompt = [(seed * 7 + position * position) % 250 for position in range(9)]
    request = a_sampling_request(prompt, max_tokens=max_tokens, seed=seed, top_k=top_k, stop=NEVER)
    return request.sent_by(Payer(owner, "", ""))


async def sample_together(engine: Engine, asked: Sequence[Asked]) -> list[Answer]:
    async with held(engine):
        sent = [
            asyncio.create_task(engine.sampler.sample(version, request))
            for version, request in asked
        ]
        await asyncio.sleep(0)
    return await asyncio.gather(*sent, return_exceptions=True)


def tokens(answer: Answer) -> list[int]:
    assert isinstance(answer, SamplingResult), answer
    return list(answer.sequences[0].tokens)


def fail_passes(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    which: Callable[[torch.Tensor], bool],
) -> None:
    """Make passes of the base that use some weights raise, selected by their token ids."""
    base: TorchBaseModel = base_of(engine.trainer)
    bad = engine.sampler._versions.acquire(version).in_memory
    compute = base._run

    def faulty(
        arguments: dict[str, Any], segments: Sequence[WeightSegment], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if which(arguments["input_ids"]) and any(each.weights is bad for each in segments):
            raise torch.OutOfMemoryError("a fault")
        return compute(arguments, segments, *args, **kwargs)

    monkeypatch.setattr(base, "_run", faulty)


def is_step(ids: torch.Tensor) -> bool:
    return ids.shape[1] == 1


async def test_a_step_that_fails_fails_the_request_that_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        names = ["one", "bad", "two"]
        for seed, name in enumerate(names, 1):
            await publish_adapter(engine, name, seed)
        alone = [
            tokens(await engine.sampler.sample(name, a_request(seed)))
            for seed, name in enumerate(names)
        ]
        fail_passes(engine, monkeypatch, "bad", is_step)

        one, bad, two = await sample_together(
            engine, [(name, a_request(seed)) for seed, name in enumerate(names)]
        )

        assert isinstance(bad, torch.OutOfMemoryError)
        assert [tokens(one), tokens(two)] == [alone[0], alone[2]]
        assert not engine.sampler.has_work()


async def test_prompts_that_arrive_together_are_computed_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        base: TorchBaseModel = base_of(engine.trainer)
        compute, passes = base.hidden_of, list[tuple[int, ...]]()

        def noted(sequences: PackedSequences, *args: Any, **kwargs: Any) -> torch.Tensor:
            passes.append(sequences.lengths)
            return compute(sequences, *args, **kwargs)

        monkeypatch.setattr(base, "hidden_of", noted)
        requests = [a_request(seed) for seed in (1, 2, 3)]

        together = await sample_together(engine, [("base", request) for request in requests])

        assert passes == [tuple(len(request.prompt) for request in requests)]
        alone = [await engine.sampler.sample("base", request) for request in requests]
        assert list(map(tokens, together)) == list(map(tokens, alone))


async def test_a_shared_prefill_that_fails_fails_the_prompt_that_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_engine(tiny_llama(), tmp_path) as engine:
        names = ["one", "bad", "two"]
        for seed, name in enumerate(names, 1):
            await publish_adapter(engine, name, seed)
        fail_passes(engine, monkeypatch, "bad", lambda _: True)

        one, bad, two = await sample_together(
            engine, [(name, a_request(seed)) for seed, name in enumerate(names)]
        )

        assert isinstance(bad, torch.OutOfMemoryError)
        assert (len(tokens(one)), len(tokens(two))) == (6, 6)


async def test_a_sequence_whose_token_cannot_be_sampled_fails_its_own_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(logits: Any, params: Any, uniforms: Any) -> Any:
        if any(each.top_k == 7 for each in params):
            raise RuntimeError("a fault")
        return sample_tokens(logits, params, uniforms)

    monkeypatch.setattr("tinkercloud_worker.torch_sampler.decode.decoding.sample_tokens", faulty)
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        alone = tokens(await engine.sampler.sample("base", a_request(1)))

        one, bad = await sample_together(
            engine, [("base", a_request(1)), ("base", a_request(2, top_k=7))]
        )

    assert isinstance(bad, RuntimeError)
    assert tokens(one) == alone


@pytest.mark.parametrize("is_slotted", [True, False], ids=["slots", "one by one"])
async def test_a_search_for_stop_strings_that_fails_fails_its_own_request(
    is_slotted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_stopped = TokenSampler._has_stopped

    def faulty(self: TokenSampler, sequence: RunningSequence) -> bool:
        if sequence.request.seed == 2 and len(sequence.tokens) == 3:
            raise RuntimeError("a fault")
        return has_stopped(self, sequence)

    monkeypatch.setattr(TokenSampler, "_has_stopped", faulty)
    with an_engine(tiny_llama(), tmp_path) as engine:
        engine.sampler._batches.slotted *= is_slotted
        await engine.sampler.publish("base", None)
        alone = tokens(await engine.sampler.sample("base", a_request(1)))

        one, bad = await sample_together(engine, [("base", a_request(n)) for n in (1, 2)])

    assert isinstance(bad, RuntimeError)
    assert tokens(one) == alone


async def test_an_adapter_that_is_not_finite_does_not_change_the_samples_of_others(
    tmp_path: Path,
) -> None:
    with an_engine(in_dtype(tiny_llama(), torch.bfloat16), tmp_path) as engine:
        for seed, name in enumerate(["one", "two"], 1):
            await publish_adapter(engine, name, seed)
        bad = engine.trainer.copy_weights("two-2")
        for tensor in bad.tensors.values():
            tensor.fill_(float("nan"))
        await engine.sampler.publish("bad", bad)
        alone = await engine.sampler.sample("one", a_request(1))

        one, _ = await sample_together(engine, [("one", a_request(1)), ("bad", a_request(2))])

    assert isinstance(one, SamplingResult)
    assert torch.tensor(one.sequences[0].logprobs).isfinite().all()
    assert tokens(one) == tokens(alone)


async def order_of_ends(engine: Engine, requests: Sequence[SamplingRequest]) -> list[str]:
    """Return the owners of requests in the order in which they ended."""
    ended: list[str] = []

    async def sample(request: SamplingRequest) -> None:
        await engine.sampler.sample("base", request)
        ended.append(request.owner)

    async with held(engine):
        sent = [asyncio.create_task(sample(request)) for request in requests]
        await asyncio.sleep(0)
    await asyncio.gather(*sent)
    return ended


async def test_a_small_request_does_not_wait_behind_those_of_an_owner_who_floods(
    tmp_path: Path,
) -> None:
    config = SamplerConfig(max_running_sequences=2, prefill_chunk_tokens=20)
    with an_engine(tiny_llama(), tmp_path, config) as engine:
        await engine.sampler.publish("base", None)
        flood = [a_request(seed, "flooding", max_tokens=12) for seed in range(20)]

        ended = await order_of_ends(engine, [*flood, a_request(99, "small", max_tokens=3)])

    assert ended[0] == "small"


async def test_one_owner_s_requests_start_in_order_of_arrival(tmp_path: Path) -> None:
    config = SamplerConfig(max_running_sequences=2)
    with an_engine(tiny_llama(), tmp_path, config) as engine:
        await engine.sampler.publish("base", None)
        sent = [a_request(seed, max_tokens=4) for seed in range(6)]
        order: list[int] = []

        async def sample(request: SamplingRequest) -> None:
            await engine.sampler.sample("base", request)
            order.append(request.seed)

        async with held(engine):
            tasks = [asyncio.create_task(sample(request)) for request in sent]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    assert order == sorted(order)
