"""Requests to servers of either kind are limited, and unlimited ones rejected."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.training.engines import a_sampling_request
from tinkercloud_worker.engine.sampling.sampler_interface import (
    PromptLogprobParams,
    SamplingRequest,
)
from tinkercloud_worker.inference.client import InferenceClient, Json, ServerUnreachable
from tinkercloud_worker.inference.dialect import Dialect
from tinkercloud_worker.inference.sglang.scoring_requests import _PART_CELLS, PromptScoring
from tinkercloud_worker.inference.sglang.sglang_dialect import SglangDialect
from tinkercloud_worker.inference.vllm import VllmDialect


class Away(InferenceClient):
    """A server that receives requests and never responds."""

    def __init__(self) -> None:
        super().__init__("http://away", key=None, max_concurrent=1)
        self.sent: list[Json] = []

    async def generate(self, path: str, body: Json) -> Json:
        self.sent.append(body)
        raise ServerUnreachable(path)


@pytest.mark.parametrize(
    ("asked", "sent"),
    [(0, 0), (1, 1), (50, 50), ((1 << 30) - 1, (1 << 30) - 1), (1 << 30, 0), (1 << 31, 0)],
)
@pytest.mark.parametrize(
    ("make", "everything"),
    [(SglangDialect, -1), (lambda client: VllmDialect(client, "tiny"), 0)],
    ids=["sglang", "vllm"],
)
async def test_a_top_k_of_more_than_32_bits_means_all_tokens(
    make: Callable[[InferenceClient], Dialect], everything: int, asked: int, sent: int
) -> None:
    client = Away()

    with pytest.raises(ServerUnreachable):
        await make(client).sample(a_sampling_request([1], top_k=asked), None)

    [body] = client.sent
    params: dict[str, Any] = body.get("sampling_params", [body])[0]
    assert params["top_k"] == (sent or everything)


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("columns", [0, 1, 20])
def test_responses_for_a_prompt_are_limited_even_if_all_targets_differ(
    top_k: int, columns: int
) -> None:
    targets = np.arange(4095 * columns).reshape(4095, columns) if columns else None

    parts = PromptScoring(scored(4096, top_k, targets)).parts

    cells = [(part.end - part.start) * (1 + top_k + len(part.named)) for part in parts]
    assert max(cells) <= 2 * _PART_CELLS
    assert [part.start for part in parts] == [1, *(part.end for part in parts[:-1])]
    assert parts[-1].end == 4096


def test_too_expensive_targets_are_rejected_but_not_equal_ones() -> None:
    different = np.arange(131071 * 20).reshape(131071, 20)

    with pytest.raises(InvalidRequest, match=r"^target_prompt_logprobs: .* Request fewer tokens"):
        PromptScoring(scored(131072, 0, different))

    PromptScoring(scored(131072, 0, np.tile(np.arange(20), (131071, 1))))


def scored(length: int, top_k: int, targets: np.ndarray | None) -> SamplingRequest:
    """Return a request that scores all positions of a prompt."""
    prompt_logprobs = PromptLogprobParams(logprobs_from=1, top_k=top_k, targets=targets)
    return a_sampling_request([1] * length, prompt_logprobs=prompt_logprobs)
