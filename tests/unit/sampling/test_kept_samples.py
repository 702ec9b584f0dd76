"""Samples that a head keeps for reports: which ones, as how much text, and failures of these."""

from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tinkercloud_api.providers.base import HeadEndpoint, HeadReport
from tinkercloud_api.providers.head_lease import hold_lease
from tinkercloud_protocol.heads.reports.kept_samples import (
    MAX_CHARACTERS,
    SAMPLES_PER_STEP,
    KeptSample,
    SampleReport,
)
from tinkercloud_testing.serving.served_heads import TOKEN, a_served_head
from tinkercloud_worker.engine.sampling.kept_samples import KeptSamples
from tinkercloud_worker.engine.turns.usage_counts import Payer, Usage

RUN = "s:train:0"
PAYER = Payer("me", "s", RUN)


def bytes_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("latin-1")


def add(samples: KeptSamples, prompt: bytes, answer: bytes = b"a", step: int = 1) -> None:
    started = samples.start(PAYER, step)
    if started is not None:
        samples.end(started, np.frombuffer(prompt, np.uint8).astype(np.int32), list(answer))


def texts(samples: KeptSamples, revision: int = 0) -> list[KeptSample]:
    return [each.text(bytes_of) for each in samples.since(revision)[1].get(RUN, [])]


@pytest.fixture
def samples() -> KeptSamples:
    """Return samples that are kept of a run."""
    found = KeptSamples()
    found.keep([RUN])
    return found


def test_nothing_is_kept_of_other_runs_and_of_weights_of_an_unknown_step() -> None:
    samples = KeptSamples()
    add(samples, b"nobody wants it")
    samples.keep(["s:train:1"])
    add(samples, b"of another")
    samples.keep([RUN])

    assert samples.start(PAYER, None) is None
    started = samples.start(PAYER, 1)
    samples.keep([])
    assert started is not None
    samples.end(started, np.array([1], np.int32), [2])
    samples.keep([RUN])

    assert texts(samples) == []


def test_the_samples_whose_requests_started_last_are_kept_in_whatever_order_they_end(
    samples: KeptSamples,
) -> None:
    started = [samples.start(PAYER, 1) for _ in range(2 * SAMPLES_PER_STEP)]
    for number, each in reversed(list(enumerate(started))):
        assert each is not None
        samples.end(each, np.array([number], np.int32), [0])

    kept = texts(samples)

    assert [ord(each.prompt) for each in kept] == [4, 5, 6, 7]
    assert [each.place for each in kept] == [0, 1, 2, 3]


def test_each_report_has_what_has_ended_since_the_one_before(samples: KeptSamples) -> None:
    add(samples, b"first")
    revision, _ = samples.since(0)
    add(samples, b"second")

    assert [each.prompt for each in texts(samples, revision)] == ["second"]
    assert [each.prompt for each in texts(samples)] == ["first", "second"]
    assert samples.since(samples.since(0)[0])[1] == {}


def test_texts_are_the_end_of_a_prompt_and_the_start_of_an_answer(samples: KeptSamples) -> None:
    add(samples, b"p" * 1_000_000 + b"end", b"start" + b"a" * 1_000_000)

    [kept] = texts(samples)

    assert (len(kept.prompt), kept.prompt[-4:]) == (MAX_CHARACTERS, "pend")
    assert (len(kept.answer), kept.answer[:6]) == (MAX_CHARACTERS, "starta")
    assert kept.prompt_tokens_left_out == 1_000_003 - MAX_CHARACTERS
    assert kept.answer_tokens_left_out == 1_000_005 - MAX_CHARACTERS


@pytest.mark.parametrize("length", [1, 7, MAX_CHARACTERS + 1])
def test_long_tokens_are_cut_as_well_and_those_left_out_are_counted(
    samples: KeptSamples, length: int
) -> None:
    add(samples, bytes(range(200)) * 20, b"ab")
    [[sample]] = samples.since(0)[1].values()

    kept = sample.text(lambda tokens: "".join(chr(97 + each % 26) * length for each in tokens))

    num_prompt = 4000 - kept.prompt_tokens_left_out
    assert len(kept.prompt) == num_prompt * length <= MAX_CHARACTERS
    assert num_prompt == MAX_CHARACTERS // length
    assert kept.answer_tokens_left_out == (0 if length <= MAX_CHARACTERS // 2 else 2)


async def test_a_text_that_cannot_be_read_ends_no_lease_and_hides_no_other_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_served_head(tmp_path) as head:
        text, kept = head.backend.text, head.backend.kept_samples
        assert text is not None

        def decode(tokens: Sequence[int]) -> str:
            if 13 in tokens:
                raise ValueError("an odd token")
            return bytes_of(tokens)

        monkeypatch.setattr(text, "decode_all", decode)
        kept.keep([RUN])
        for prompt in (b"\x0d", b"good"):
            add(kept, prompt)
        head.backend.usage.count(PAYER, Usage(sampled_tokens=1))
        received: list[HeadReport] = []

        async def record(report: HeadReport) -> None:
            received.append(report)
            if isinstance(report, SampleReport):
                head.lifecycle.begin_stop()

        await hold_lease(head.client, HeadEndpoint(head.url, TOKEN, "g1"), record, lambda _: None)

    [report] = [each for each in received if isinstance(each, SampleReport)]
    assert [each.prompt for each in report.samples] == ["good"]


async def test_only_api_servers_say_whose_samples_a_head_keeps(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head, aiohttp.ClientSession() as stranger:
        async with stranger.put(f"{head.url}/sampled_runs", json={"runs": [RUN]}) as answer:
            assert answer.status == 401

        assert head.backend.kept_samples.start(PAYER, 1) is None
