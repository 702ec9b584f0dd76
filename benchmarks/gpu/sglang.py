"""Our SGLang client against a real server, and its logprobs against our trainer's.

The model is small and random: the figures test the transfer of tensors, names, seeds and memory,
not speed.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from string import ascii_lowercase
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.engines import a_request
from benchmarks.gpu.sglang_checks.sglang_proof import (
    BASE,
    DRAWN,
    MIXTURE,
    OUTSIDE_EXPERTS,
    SHAPE,
    SMALL,
    VERSIONS,
    WIDE,
    Proof,
    a_proof,
    gone_by,
    head_config,
    latent,
    prompt,
)
from benchmarks.shared.measuring import Measurement, largest_error
from tinkercloud_protocol.heads.launch import TrainerConfig
from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_testing.resources.sessions import COLOCATED
from tinkercloud_testing.small_models.models import VOCAB_SIZE, byte_tokenizer
from tinkercloud_worker.build_sampler import inference_sampler
from tinkercloud_worker.engine.sampling.sampler_interface import PromptLogprobParams, StopRules
from tinkercloud_worker.inference.client import NotThere
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import weights as sglang_weights
from tinkercloud_worker.inference.sglang.process_group import NAME, SglangGroup
from tinkercloud_worker.inference.weight_host import HeadWeightHost
from tinkercloud_worker.metrics import Way

LETTERS = frozenset(ascii_lowercase)
"""Stop strings, one of which is eventually sampled."""
_OFF = 1e-3
_SMALL_PART = 1 << 14
"""Bytes of tensors per request, small enough to force many requests."""
_RANKS = 2
_LONG_PROMPT = 20
_WAITED_SECONDS = 60.0


def served(bench: Bench) -> Iterator[Measurement]:
    """S1 to S9, S13, S14, S29, S30: a server as in a pod, in float32."""
    shape = SMALL if bench.device.type == "cpu" else SHAPE
    with a_proof(bench, shape.build, torch.float32) as proof:
        for check in SERVED:
            yield check(proof)
        # These come last, because several heads then have changed the server's weights.
        yield whole(proof, "S8", "in requests", proof.sampler, "request")
        yield whole(proof, "S9", "from its folder", proof.reader, "file")
        yield _forsaken(proof)
        yield carried(proof, "S13", "over a process group", proof.joined, "group")


def mixture(bench: Bench) -> Iterator[Measurement]:
    """S16 to S18: servers of a mixture of experts, in float32."""
    with a_proof(bench, MIXTURE.build, torch.float32) as proof:
        yield _alone_and_together(proof, "S16", "a mixture, adapters of its experts too")
    with a_proof(bench, MIXTURE.build, torch.float32, modules=OUTSIDE_EXPERTS) as proof:
        yield whole(proof, "S17", "of a mixture in requests", proof.sampler, "request")
        yield whole(proof, "S18", "of a mixture from its folder", proof.reader, "file")


def latent_attention(bench: Bench) -> Iterator[Measurement]:
    """S19, S20: servers of a DeepSeek-V3, in float32."""
    with a_proof(bench, latent, torch.float32) as proof:
        yield _alone_and_together(proof, "S19", "latent attention, adapters of it and of experts")
    small_parts = patch.object(sglang_weights, "_BUCKET_BYTES", _SMALL_PART)
    with a_proof(bench, latent, torch.float32, modules=OUTSIDE_EXPERTS) as proof, small_parts:
        yield whole(
            proof, "S20", "with latent attention in many requests", proof.sampler, "request"
        )


def two_ranks(bench: Bench) -> Iterator[Measurement]:
    """S21 to S23, S25: servers that divide the model over two ranks, in float32.

    Raises:
        Skipped: they would have one GPU.
    """
    if bench.device.type == "cuda" and torch.cuda.device_count() < _RANKS:
        raise Skipped("two ranks need two GPUs")
    with a_proof(bench, SMALL.build, torch.float32, ranks=_RANKS) as proof:
        yield _alone_and_together(proof, "S21", "two ranks, a base and adapters")
        yield whole(proof, "S22", "to two ranks in requests", proof.sampler, "request")
        yield carried(proof, "S23", "to two ranks over a process group", proof.joined, "group")
    with a_proof(bench, MIXTURE.build, torch.float32, ranks=_RANKS) as proof:
        yield _alone_and_together(proof, "S25", "two ranks of a mixture, adapters of its experts")


def colocated(bench: Bench) -> Iterator[Measurement]:
    """S10 to S12: a server that releases its memory while others compute."""
    if bench.device.type == "cuda":
        shape, dtype, wanted = SHAPE, torch.bfloat16, ">= 1"
    else:
        # Triton's interpreter multiplies the bits of bfloat16. Without the weights it is 0.107 GiB.
        shape, dtype, wanted = WIDE, torch.float32, ">= 0.115"
    with a_proof(bench, shape.build, dtype, sampler=COLOCATED) as proof:
        yield _rounded(proof, str(dtype).removeprefix("torch."))
        yield _memory(bench, proof, wanted)
        yield _afterwards(proof)


def alone(proof: Proof) -> Measurement:
    gaps = [proof.gap(version) for version in VERSIONS]
    figure = _adapted(proof, "S1", "a base, an adapter, another", np.concatenate(gaps))
    return gone_by(figure, proof.loads, "adapter", "request")


def _alone_and_together(proof: Proof, figure: str, what: str) -> Measurement:
    gaps = [*(proof.gap(version) for version in VERSIONS), proof.gap(*VERSIONS)]
    return _adapted(proof, figure, what, np.concatenate(gaps))


def _adapted(proof: Proof, figure: str, what: str, gap: np.ndarray) -> Measurement:
    apart = proof.gap("one", against="two").mean()
    note = f"mean {gap.mean():.1e}; from another adapter's {apart:.2f}"
    return Measurement(
        figure, f"SGLang's logprobs - our trainer's: {what}, float32",
        largest_error(gap), "", "<= 1e-3", "<= 1e-5", note,
    )  # fmt: skip


def _together(proof: Proof) -> Measurement:
    gap = proof.gap("two", "base", "one", "two")
    off = int((gap > _OFF).sum())
    return Measurement(
        "S2", "the same, all in one batch", largest_error(gap), "", "<= 1e-3", "<= 1e-5",
        f"mean {gap.mean():.1e}; {off} of {gap.size} tokens are off by more than {_OFF}",
    )  # fmt: skip


def from_files(proof: Proof) -> Measurement:
    loads = proof.publish("one", sampler=proof.reader)
    request = replace(a_request(prompt(7), 1), prompt_logprobs=PromptLogprobParams(logprobs_from=1))
    [sent] = proof.sample(("one", request))
    [read] = proof.sample(("one", request), sampler=proof.reader)
    figure = Measurement(
        "S3", "an adapter that SGLang read from files - the same one sent to it",
        _gap(read.prompt.logprobs, sent.prompt.logprobs), "", "<= 1e-5",
    )  # fmt: skip
    return gone_by(figure, loads, "adapter", "file")


def _scored(proof: Proof) -> Measurement:
    tokens = prompt(5)
    targets = np.full((len(tokens) - 1, 2), -1)
    targets[3], targets[12] = (7, 9), (11, -1)
    prompt_logprobs = PromptLogprobParams(logprobs_from=1, top_k=3, targets=targets)
    request = replace(a_request(tokens, 1), prompt_logprobs=prompt_logprobs)
    proof.reference.publish("one", proof.trainer.copy_weights("one"))
    [ours] = proof.reference.sample("one", request)
    [theirs] = proof.sample(("one", request))
    assert theirs.prompt.top is not None
    assert ours.prompt.top is not None
    gaps = [
        _gap(theirs.prompt.logprobs, ours.prompt.logprobs),
        _gap(theirs.prompt.targets, ours.prompt.targets),
        _gap(theirs.prompt.top.logprobs, ours.prompt.top.logprobs),
    ]
    return Measurement(
        "S4", "a prompt's logprobs, named and most likely tokens - our sampler's, float32",
        largest_error(gaps), "", "<= 1e-3", "<= 1e-4",
        ", ".join(f"{gap:.1e}" for gap in gaps),
    )  # fmt: skip


def _gap(theirs: FloatArray | None, ours: FloatArray | None) -> float:
    """Return the largest difference; infinity if only one of both has a value."""
    assert theirs is not None
    assert ours is not None
    known = ~np.isnan(ours)
    if (known != ~np.isnan(theirs)).any():
        return math.inf
    return largest_error(np.abs(theirs[known] - ours[known]))


def _seeds(proof: Proof) -> Measurement:
    request = a_request(prompt(2), DRAWN, num_samples=2)
    crowd = [("two", a_request(prompt(seed, 20), DRAWN)) for seed in range(16)]
    [alone] = proof.sample(("one", request))
    again, *_ = proof.sample(("one", request), *crowd)
    [other] = proof.sample(("one", replace(request, seed=99)))
    differing, others = (
        sum(
            int((np.asarray(a.tokens) != b.tokens).sum())
            for a, b in zip(alone.sequences, result.sequences, strict=True)
        )
        for result in (again, other)
    )
    first, second = (s.tokens for s in alone.sequences)
    note = f"with another seed {others}; the two samples of one request: {first != second}"
    return Measurement(
        "S5", "tokens that differ when a seed is drawn with again, among 16 others",
        float(differing), "tokens", "<= 0", note=note,
    )  # fmt: skip


def _stops(proof: Proof) -> Measurement:
    ends = frozenset(range(60))
    tokens = prompt(3)
    by_token, by_length, by_text, best = (
        result.sequences[0]
        for result in proof.sample(
            ("one", replace(a_request(tokens, 200), stop=StopRules(ends, ()))),
            ("one", a_request(tokens, 20)),
            ("one", replace(a_request(tokens, 200), stop=StopRules(frozenset(), (*LETTERS,)))),
            ("one", replace(a_request(tokens, 20), top_k=1, top_logprobs=2)),
        )
    )
    text = byte_tokenizer().decode(list(by_text.tokens))
    assert best.top is not None
    wrong = {
        "stop tokens": not (by_token.stopped and by_token.tokens[-1] in ends),
        "a token after the stop": bool(ends & set(by_token.tokens[:-1])),
        "length": by_length.stopped or len(by_length.tokens) != 20,
        "stop strings": not (by_text.stopped and text[-1:] in LETTERS),
        "text after the stop": bool(LETTERS & set(text[:-1])),
        "top_k of 1": best.tokens != best.top.token_ids[:, 0].tolist(),
    }
    return _count("S6", "rules of stopping and of top-k that did not hold", wrong)


def _lost(proof: Proof) -> Measurement:
    request = a_request(prompt(4), 4)
    # In the order of publication, which determines names.
    name, gone = sorted(path.name for path in (proof.scratch / "sent").iterdir())
    proof.runner.run(proof.dialect.unload_adapter(name))
    [again] = proof.sample(("one", request))
    proof.runner.run(proof.sampler.retire("two"))
    proof.runner.run(_settled(proof.sampler))
    wrong = {
        "an adapter that was lost": len(again.sequences[0].tokens) != 4,
        "a retired version": not _raises(NotFound, lambda: proof.sample(("two", request))),
        "its name in the server": not _raises(
            NotThere, lambda: proof.runner.run(proof.dialect.sample(request, gone))
        ),
        "an adapter of too high a rank": not _raises(
            InvalidRequest, lambda: proof.publish("large")
        ),
    }
    proof.runner.run(proof.dialect.check_health())
    return _count("S7", "wrong answers about adapters that are not there", wrong)


def _read_once(proof: Proof) -> Measurement:
    """Continue a conversation, and send the same prompt to another adapter."""
    start = prompt(40, 3 * _LONG_PROMPT)
    [drawn] = proof.sample(("one", a_request(start, DRAWN)))
    known = [*start, *drawn.sequences[0].tokens]
    continuation = a_request([*known, *prompt(41, _LONG_PROMPT)], 1)
    [result] = proof.sample(("one", continuation))
    [apart] = proof.sample(("two", continuation))
    again = len(known) - result.prompt.cached_tokens
    note = (
        f"of {len(known)}; another adapter takes {apart.prompt.cached_tokens} of them for its own"
    )
    return Measurement(
        "S29", "tokens that SGLang prefills again when a conversation continues",
        math.inf if apart.prompt.cached_tokens else float(again), "tokens", "<= 1", note=note,
    )  # fmt: skip


def _of_others(proof: Proof) -> Measurement:
    """Use the server like one operated by others, which only receives adapters."""
    config = head_config(proof.server, proof.scratch, "external", {}, TrainerConfig())
    servers = config.sampler.model_copy(update={"backend": "external"})
    sampler = inference_sampler(
        config.model_copy(update={"sampler": servers}), byte_tokenizer(), HeadWeightHost()
    )
    try:
        proof.publish(*VERSIONS, sampler=sampler)
        gap = proof.gap(*VERSIONS, sampler=sampler)
        is_refused = _raises(InvalidRequest, lambda: proof.publish("whole", sampler=sampler))
    finally:
        proof.runner.run(sampler.close())
    left = proof.gap(*VERSIONS).max()
    return Measurement(
        "S30", "SGLang's logprobs - our trainer's: as a server of others (backend external), float32",
        largest_error(gap) if is_refused else math.inf, "", "<= 1e-3", "<= 1e-5",
        f"whole models refused by name: {is_refused}; of the head whose engine it is {left:.1e}",
    )  # fmt: skip


def whole(proof: Proof, name: str, how: str, sampler: InferenceSampler, way: Way) -> Measurement:
    """Replace the server's weights, then load the base and an adapter again."""
    loads = proof.publish("whole", BASE, sampler=sampler)
    gap = largest_error(proof.gap("whole", sampler=sampler))
    apart = proof.gap("whole", against=BASE, sampler=sampler).mean()
    others = [version for version in (BASE, "one") if version in proof.versions]
    back = largest_error(np.concatenate([proof.gap(each, sampler=sampler) for each in others]))
    after = " and ".join(others)
    note = f"from the base model's {apart:.2f}; the model {gap:.1e}, {after} afterwards {back:.1e}"
    figure = Measurement(
        name, f"SGLang's logprobs - our trainer's: a whole model {how}, {after} after it, float32",
        largest_error([gap, back]), "", "<= 1e-3", "<= 1e-5", note,
    )  # fmt: skip
    return gone_by(figure, loads, "model", way)


def _forsaken(proof: Proof) -> Measurement:
    """Make the server wait for a part of a model from a killed rank."""
    client = proof.dialect.client
    group = SglangGroup(client, "gloo", HeadWeightHost())
    part = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[VOCAB_SIZE, 256]]}

    async def waits() -> float:
        await group.join(1)
        await client.post("/begin_weight_update", {}, seconds=_WAITED_SECONDS)
        body = {**part, "group_name": NAME}
        receiving = asyncio.create_task(
            client.post("/update_weights_from_distributed", body, seconds=_WAITED_SECONDS)
        )
        await asyncio.sleep(1)
        assert not receiving.done()
        began = time.monotonic()
        await group.leave()
        with suppress(InvalidRequest):
            await receiving
            return math.inf
        waited = time.monotonic() - began
        await client.post("/end_weight_update", {}, seconds=_WAITED_SECONDS)
        return waited

    return Measurement(
        "S14", "how long SGLang waits in a broadcast for a head's rank that was killed",
        proof.runner.run(waits()), "s", "<= 10", "<= 1",
    )  # fmt: skip


def carried(proof: Proof, name: str, how: str, sampler: InferenceSampler, way: Way) -> Measurement:
    proof.publish("one", sampler=sampler)
    return whole(proof, name, how, sampler, way)


def _rounded(proof: Proof, dtype: str) -> Measurement:
    gap = proof.gap(*VERSIONS)
    note = f"mean exp of it {float(np.exp(gap).mean()):.4f}, at most {gap.max():.3f}"
    return Measurement(
        "S10", f"mean gap of SGLang's logprobs and our trainer's, {dtype}",
        float(gap.mean()), "", "<= 0.02", "<= 1e-3", note,
    )  # fmt: skip


def _memory(bench: Bench, proof: Proof, wanted: str) -> Measurement:
    def held() -> int:
        if bench.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            return total - free
        return proof.server.resident_bytes()

    async def given() -> int:
        # On a CPU, a cache that was never written takes no memory yet.
        async with proof.sampler.training():
            pass
        await proof.sampler.sample(BASE, a_request(prompt(1), 1))
        before = held()
        async with proof.sampler.training():
            return before - held()

    freed = proof.runner.run(given())
    return Measurement(
        "S11", "memory that the server gives away for training", freed / (1 << 30), "GiB", wanted
    )


def _afterwards(proof: Proof) -> Measurement:
    proof.publish("whole")
    asked = [(version, a_request(prompt(6), DRAWN)) for version in (*VERSIONS, "whole")]

    async def nothing() -> None:
        async with proof.sampler.training():
            pass

    before = proof.sample(*asked)
    proof.runner.run(nothing())
    after = proof.sample(*asked)
    gaps = [
        np.abs(np.asarray(b.sequences[0].logprobs) - a.sequences[0].logprobs).max()
        for b, a in zip(before, after, strict=True)
    ]
    return Measurement(
        "S12", "logprobs of base, adapters and a whole model after that - before",
        largest_error(gaps), "", "<= 1e-6",
    )  # fmt: skip


Check = Callable[[Proof], Measurement]
SERVED: tuple[Check, ...] = (
    alone,
    _together,
    from_files,
    _scored,
    _seeds,
    _stops,
    _read_once,
    _of_others,
    _lost,
)


def _raises(error: type[Exception], work: Callable[[], object]) -> bool:
    try:
        work()
    except error:
        return True
    return False


async def _settled(sampler: InferenceSampler) -> None:
    await asyncio.gather(*sampler._cleaning)


def _count(figure: str, what: str, wrong: dict[str, bool]) -> Measurement:
    failed = [name for name, is_wrong in wrong.items() if is_wrong]
    note = ", ".join(failed) or ", ".join(wrong)
    return Measurement(figure, what, float(len(failed)), f"of {len(wrong)}", "<= 0", note=note)
