"""Sampling and scoring: requests to engines, and results equal to the torch sampler's."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.sglang.engine import (
    FakeSglang,
)
from tinkercloud_testing.sglang.sampling import (
    NEVER,
    PROMPTS,
    an_adapter,
    assert_same,
    publish,
)
from tinkercloud_testing.sglang.source import definition
from tinkercloud_testing.training.engines import Engine, a_sampling_request
from tinkercloud_worker.engine.sampling.sampler_interface import (
    LogitChanges,
    PromptLogprobParams,
    SamplingRequest,
    StopRules,
)
from tinkercloud_worker.inference.client import ServerError
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import scoring_requests

pytestmark = pytest.mark.slow


async def test_samples_stops_seeds_and_prompt_scores_equal_the_torch_sampler(
    engine: Engine, sampler: InferenceSampler
) -> None:
    versions = ["base", "one", "two"]
    await publish(engine, sampler, "base", None)
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    await publish(engine, sampler, "two", an_adapter(engine, 2))
    targets = np.array([[-1, -1], [3, -1], [40, 50], [-1, 7], [1, 2]])
    requests = [
        a_sampling_request(PROMPTS[0], seed=9, temperature=0.7, top_p=0.8, top_k=50),
        a_sampling_request(PROMPTS[1], stop=NEVER, top_logprobs=3, max_tokens=20),
        a_sampling_request(PROMPTS[1], stop=StopRules(frozenset(range(60)), ()), max_tokens=40),
        a_sampling_request(PROMPTS[0], stop=StopRules(frozenset(), ("a", "b")), max_tokens=40),
        a_sampling_request(
            PROMPTS[2], prompt_logprobs=PromptLogprobParams(logprobs_from=3, top_k=2)
        ),
        a_sampling_request(
            PROMPTS[2], prompt_logprobs=PromptLogprobParams(top_k=2, targets=targets)
        ),
        a_sampling_request([3], prompt_logprobs=PromptLogprobParams(logprobs_from=1)),
    ]
    pairs = [(version, request) for version in versions for request in requests]

    theirs = await asyncio.gather(*[sampler.sample(*pair) for pair in pairs])
    ours = await asyncio.gather(*[engine.sampler.sample(*pair) for pair in pairs])

    for their, our in zip(theirs, ours, strict=True):
        assert_same(their, our)


async def test_penalties_and_biases_change_samples_but_not_their_logprobs(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    changes = [
        LogitChanges(frequency_penalty=1.5, presence_penalty=0.5),
        LogitChanges(bias=((40, 6.0), (41, -100.0))),
    ]
    requests = [
        replace(
            a_sampling_request(PROMPTS[0], seed=9, num_samples=2, top_logprobs=3, max_tokens=20),
            changes=change,
        )
        for change in changes
    ]
    requests.append(replace(a_sampling_request(PROMPTS[0], seed=9), min_p=0.3))

    for request in requests:
        theirs = await sampler.sample("one", request)
        for index, sequence in enumerate(theirs.sequences):
            alone = replace(request, seed=request.seed + index, num_samples=1)
            ours = await engine.sampler.sample("one", alone)
            assert_same(replace(theirs, sequences=[sequence]), ours)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (replace(a_sampling_request([1]), changes=LogitChanges(repetition_penalty=1.1)), "repetit"),
        (replace(a_sampling_request([1], top_p=0.9), min_p=0.1), "min_p"),
    ],
)
async def test_what_sglang_means_differently_is_refused_by_name(
    engine: Engine, sampler: InferenceSampler, request_: SamplingRequest, name: str
) -> None:
    await publish(engine, sampler, "base", None)

    with pytest.raises(InvalidRequest, match=name):
        await sampler.sample("base", request_)


@pytest.mark.parametrize("cells", [1, 40, 1000])
async def test_targets_scored_in_parts_equal_those_of_one_request(
    engine: Engine,
    sampler: InferenceSampler,
    fakes: list[FakeSglang],
    monkeypatch: pytest.MonkeyPatch,
    cells: int,
) -> None:
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    monkeypatch.setattr(scoring_requests, "_PART_CELLS", cells)
    prompt = PROMPTS[1]
    targets = np.random.default_rng(1).integers(-1, 256, (len(prompt) - 1, 5))
    targets[:3] = -1
    requests = [
        a_sampling_request(prompt, prompt_logprobs=prompt_logprobs)
        for prompt_logprobs in (
            PromptLogprobParams(targets=targets),
            PromptLogprobParams(logprobs_from=9, targets=targets),
            PromptLogprobParams(logprobs_from=2, top_k=3, targets=targets),
            PromptLogprobParams(top_k=3),
            PromptLogprobParams(targets=np.full_like(targets, -1)),
        )
    ]

    for request in requests:
        theirs = await sampler.sample("one", request)

        assert_same(theirs, await engine.sampler.sample("one", request))
        if theirs.prompt.targets is not None:
            assert (theirs.prompt.targets[targets < 0] == 0).all()
    bodies = [body for fake in fakes for body in fake.called("/generate")]
    named = [body for body in bodies if "token_ids_logprob" in body]
    assert len(named) > 3
    for body in named:
        positions = len(body["input_ids"][0]) - 1 - body["logprob_start_len"]
        assert positions == 1 or positions * len(body["token_ids_logprob"][0]) <= cells


@pytest.mark.parametrize("top_k", [(1 << 31) - 1, 1 << 31, 1 << 70])
async def test_a_top_k_beyond_the_vocabulary_samples_from_all_tokens_without_a_crash(
    sampler: InferenceSampler, fakes: list[FakeSglang], top_k: int
) -> None:
    await sampler.publish("base", None)

    most = await sampler.sample("base", a_sampling_request(PROMPTS[0], top_k=top_k, stop=NEVER))

    everything = await sampler.sample("base", a_sampling_request(PROMPTS[0], stop=NEVER))
    assert most.sequences[0].tokens == everything.sequences[0].tokens


async def test_sample_k_equals_the_first_sample_with_seed_plus_k(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await publish(engine, sampler, "base", None)

    together = await sampler.sample("base", a_sampling_request([1, 2], num_samples=3, seed=9))
    apart = [
        await engine.sampler.sample("base", a_sampling_request([1, 2], seed=9 + k))
        for k in range(3)
    ]

    assert [s.tokens for s in together.sequences] == [one.sequences[0].tokens for one in apart]


async def test_a_cached_prompt_is_recomputed_only_from_the_first_scored_position(
    sampler: InferenceSampler, fakes: list[FakeSglang]
) -> None:
    await sampler.publish("base", None)
    prompt_logprobs = PromptLogprobParams(logprobs_from=4)

    await sampler.sample("base", a_sampling_request(PROMPTS[2], prompt_logprobs=prompt_logprobs))

    bodies = [body for fake in fakes for body in fake.called("/generate")]
    assert [body["logprob_start_len"] for body in bodies].count(3) == 1


async def test_the_number_of_cached_prompt_tokens_is_reported(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await publish(engine, sampler, "one", an_adapter(engine, 1))
    request = a_sampling_request(list(range(20, 80)), num_samples=2, stop=NEVER)

    first = await sampler.sample("one", request)
    again = await sampler.sample("one", request)

    assert first.prompt.cached_tokens == 0
    assert again.prompt.cached_tokens >= 50


async def test_an_engine_that_returns_tempered_logprobs_is_rejected(
    fakes: list[FakeSglang], sampler: InferenceSampler
) -> None:
    for fake in fakes:
        fake.gives_tempered_logprobs = True
    await sampler.publish("base", None)

    with pytest.raises(ServerError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
        await sampler.sample("base", a_sampling_request([1]))


def test_the_definitions_reject_unknown_fields() -> None:
    known = definition("LoadLoRAAdapterReqInput")

    known.model_validate({"lora_name": "a", "lora_path": "b"})
    for wrong in ({"lora_name": "a"}, {"lora_name": "a", "lora_path": "b", "upsert": True}):
        with pytest.raises(ValueError, match=r"lora_path|upsert"):
            known.model_validate(wrong)
