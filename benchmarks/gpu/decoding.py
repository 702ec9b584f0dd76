"""Decoding speed, and the delay until a trained adapter can be sampled."""

from collections.abc import Iterator
from itertools import count

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engines import (
    MODEL,
    RunningSampler,
    a_prompt,
    a_request,
    a_sampler,
    a_trainer,
    base_of,
)
from benchmarks.gpu.workloads import Shape
from benchmarks.shared.measuring import Measurement
from tinkercloud_worker.device.accelerator import graph_capturer_for


def small(bench: Bench) -> Iterator[Measurement]:
    """G11 with a small model."""
    shape = bench.work.decoding
    with a_sampler(base_of(bench, shape), 1, graph_capturer_for(bench.device)) as sampler:
        yield _alone(bench, "G11a", shape, sampler, (">= 300", ">= 900"))


def large(bench: Bench) -> Iterator[Measurement]:
    """G11 and G12 with the largest model, and G14: the delay until its adapter can be sampled."""
    work = bench.work
    base = base_of(bench, work.large)
    with a_sampler(base, work.together, graph_capturer_for(bench.device)) as sampler:
        yield _alone(bench, "G11b", work.large, sampler, (">= 130", ">= 190"))
        yield _together(bench, sampler)
        trainer = a_trainer(base, work.rank, max_batch_tokens=1024)
        versions = (f"v{number}" for number in count())
        (seconds,) = bench.seconds(
            lambda: sampler.publish(next(versions), trainer.publication(MODEL)()), rounds=7
        )
    size = trainer.copy_weights(MODEL).size_bytes >> 20
    yield Measurement(
        "G14", f"{work.large.name}: an adapter from trainer to sampler", 1e3 * seconds, "ms",
        "<= 20", "<= 1", f"{size} MiB",
    )  # fmt: skip


def _alone(
    bench: Bench, name: str, shape: Shape, sampler: RunningSampler, wanted: tuple[str, str]
) -> Measurement:
    """Measure the time per additional token of one sequence."""
    sampler.publish("base", None)
    drawn, seeds = bench.work.drawn, count()

    def draw(max_tokens: int) -> None:
        prompt = a_prompt(shape, bench.work.prompt, next(seeds))
        sampler.sample("base", a_request(prompt, max_tokens))

    short, long = bench.seconds(lambda: draw(1), lambda: draw(1 + drawn))
    speed = drawn / max(long - short, 1e-9)
    return Measurement(name, f"{shape.name}: decoding one sequence", speed, "tokens/s", *wanted)


def _together(bench: Bench, sampler: RunningSampler) -> Measurement:
    """Measure many sequences with different prompts, including prefill."""
    work, seeds = bench.work, count(1000)

    def draw() -> None:
        prompts = [a_prompt(work.large, work.prompt, next(seeds)) for _ in range(work.together)]
        sampler.sample("base", *[a_request(prompt, work.drawn) for prompt in prompts])

    (seconds,) = bench.seconds(draw, rounds=1)
    speed = work.together * work.drawn / seconds
    what = f"{work.large.name}: decoding {work.together} sequences, prefill included"
    note = f"{work.prompt} + {work.drawn} tokens each"
    return Measurement("G12", what, speed, "tokens/s", ">= 5000", ">= 10000", note)
