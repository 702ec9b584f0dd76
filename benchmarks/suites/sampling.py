"""The sampler against Hugging Face generation on the same model, and against its own parts
alone."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.limits import products
from benchmarks.shared.measuring import Measurement, medians
from benchmarks.suites.training import a_batch
from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, StopRules
from tinkercloud_worker.engine.turns.engine_thread import EngineThread
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.sampler import TorchSampler
from tinkercloud_worker.torch_sampler.versions import Versions
from tinkercloud_worker.torch_trainer.trainer import TorchTrainerWithSampler

NEVER = StopRules(frozenset(), ())


class Bench:
    """A sampler on its engine thread, and a plain model to compare with."""

    def __init__(self, folder: str) -> None:
        self.base = TorchBaseModel.load(folder, torch.float32)
        self.thread = EngineThread(on_crash=lambda error: print("engine failed:", error))
        self.sampler = TorchSampler(
            self.base,
            AutoTokenizer.from_pretrained(folder),
            SamplerConfig(),
            versions=Versions(Path(tempfile.mkdtemp()), 1 << 30),
            wake=self.thread.wake,
        )
        self.thread.start(self.sampler)
        self.trainer = TorchTrainerWithSampler(self.base, max_batch_tokens=2048)
        self.trainer.add_model("m", LoraConfig(rank=16, seed=1))
        self.plain = AutoModelForCausalLM.from_pretrained(folder)
        self.rng = np.random.default_rng(0)
        self.run(self.sampler.publish("base", None))
        self.run(self.sampler.publish("lora", self.trainer.publication("m")()))

    @staticmethod
    def run(coroutine: object) -> object:
        return asyncio.run(coroutine)  # type: ignore[arg-type]

    def prompt(self, length: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.base.vocab_size, length)]

    def sample(self, *requests: SamplingRequest, delay: float = 0.0) -> list[object]:
        async def one(index: int, request: SamplingRequest) -> object:
            await asyncio.sleep(index * delay)
            return await self.sampler.sample("base", request)

        async def everything() -> list[object]:
            return await asyncio.gather(*[one(i, r) for i, r in enumerate(requests)])

        return asyncio.run(everything())

    def generate(self, prompts: list[list[int]], max_tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        self.plain.generate(  # type: ignore[misc]  # transformers annotates self with a protocol
            ids, attention_mask=mask, max_new_tokens=max_tokens, min_new_tokens=max_tokens,
            do_sample=True, top_k=0, pad_token_id=0,
        )  # fmt: skip


def a_request(prompt: list[int], max_tokens: int, num_samples: int = 1) -> SamplingRequest:
    return SamplingRequest(
        np.asarray(prompt, np.int32), num_samples, max_tokens, seed=1, temperature=1.0,
        top_k=0, top_p=1.0, stop=NEVER,
    )  # fmt: skip


def measure(folder: str) -> Iterator[Measurement]:
    bench = Bench(folder)
    prompts = [bench.prompt(32) for _ in range(8)]
    ours, theirs, prefill, step = medians(
        lambda: bench.sample(*[a_request(p, 32) for p in bench_prompts(bench, 8, 32)]),
        lambda: bench.generate(prompts, 32),
        products(bench.base, 8 * 32),
        products(bench.base, 8),
        rounds=5,
    )
    note = f"limit, the products alone: {theirs / (prefill + 31 * step):.2f}"
    yield Measurement(
        "C11", "8 requests at once / HF generate", theirs / ours, "x", ">= 1.0", ">= 1.3", note
    )

    lengths, budgets = [16, 32, 64, 24, 48, 20, 40, 96], [8, 64, 16, 96, 12, 24, 48, 32]
    mixed = [bench.prompt(length) for length in lengths]
    ours, theirs = medians(
        lambda: bench.sample(
            *[a_request(bench.prompt(n), b) for n, b in zip(lengths, budgets, strict=True)],
            delay=0.05,
        ),
        lambda: bench.generate(mixed, max(budgets)),
        rounds=3,
    )
    yield Measurement(
        "C12",
        "8 staggered, mixed lengths / HF static batch",
        theirs / ours,
        "x",
        ">= 1.5",
        ">= 2.5",
    )

    group, singles = medians(
        lambda: bench.sample(a_request(bench.prompt(512), 8, num_samples=8)),
        lambda: bench.sample(*[a_request(p, 8) for p in bench_prompts(bench, 8, 512)]),
        rounds=3,
    )
    yield Measurement(
        "C13",
        "8 independent / 8 samples of one 512-token prompt",
        singles / group,
        "x",
        ">= 2",
        ">= 5",
    )

    yield _roofline(bench)
    yield _consistency(bench)
    yield _publish(bench)
    bench.thread.stop()


def bench_prompts(bench: Bench, count: int, length: int) -> list[list[int]]:
    """Return new prompts, so that no prefix is cached from the previous round."""
    return [bench.prompt(length) for _ in range(count)]


def _roofline(bench: Bench) -> Measurement:
    weights = list(bench.base.named_weights().values())
    num_bytes = sum(w.nbytes for w in weights)
    blob = torch.ones(num_bytes // 4)
    one, more, read, limit = medians(
        lambda: bench.sample(a_request(bench.prompt(8), 1)),
        lambda: bench.sample(a_request(bench.prompt(8), 33)),
        blob.sum,
        products(bench.base, 1),
        rounds=5,
    )
    step = (more - one) / 32
    note = f"{1 / step:.1f} tokens/s; limit, the products alone: {read / limit:.2f}"
    return Measurement(
        "C14", "decoding: weights read / plain read", read / step, "", ">= 0.4", ">= 0.7", note
    )


def _consistency(bench: Bench) -> Measurement:
    prompt = bench.prompt(40)
    (result,) = bench.sample(a_request(prompt, 64))
    sequence = result.sequences[0]  # type: ignore[attr-defined]
    ids = np.asarray([*prompt, *sequence.tokens], np.int32)
    datum = Datum(ids[:-1], {"target_tokens": ids[1:].astype(np.int64)})
    output = bench.trainer.forward("m", a_batch(bench.trainer, [datum]))
    gap = np.abs(output.logprobs[0][39:] - np.asarray(sequence.logprobs)).max()
    return Measurement(
        "C15", "largest gap of sampling and training logprobs", float(gap), "", "<= 1e-4", "<= 1e-5"
    )


def _publish(bench: Bench) -> Measurement:
    counter = iter(range(1000))

    def publish() -> None:
        weights = bench.trainer.publication("m")()
        bench.run(bench.sampler.publish(f"v{next(counter)}", weights))

    (seconds,) = medians(publish)
    return Measurement(
        "C10", "publish weights for a sampler (engine only)", 1e3 * seconds, "ms", "<= 50", "<= 10"
    )
