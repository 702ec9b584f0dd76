"""What is sent to servers of either kind has bounds, and what has none is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from tinkercloud_testing.engines import a_sampling_request
from tinkercloud_worker.inference.client import InferenceClient, Json, ServerUnreachable
from tinkercloud_worker.inference.dialect import Dialect
from tinkercloud_worker.inference.sglang.dialect import SglangDialect
from tinkercloud_worker.inference.vllm import VllmDialect


class Away(InferenceClient):
    """A server that is sent requests, and never answers."""

    def __init__(self) -> None:
        super().__init__("http://away", key=None, max_concurrent=1)
        self.sent: list[Json] = []

    async def generate(self, path: str, body: Json) -> Json:
        self.sent.append(body)
        raise ServerUnreachable(path)


@pytest.mark.parametrize(
    ("asked", "told"),
    [(0, 0), (1, 1), (50, 50), ((1 << 30) - 1, (1 << 30) - 1), (1 << 30, 0), (1 << 31, 0)],
)
@pytest.mark.parametrize(
    ("make", "everything"),
    [(SglangDialect, -1), (lambda client: VllmDialect(client, "tiny"), 0)],
    ids=["sglang", "vllm"],
)
async def test_a_top_k_that_no_server_can_count_to_is_all_tokens(
    make: Callable[[InferenceClient], Dialect], everything: int, asked: int, told: int
) -> None:
    client = Away()

    with pytest.raises(ServerUnreachable):
        await make(client).draw(a_sampling_request([1], top_k=asked), None)

    [body] = client.sent
    params: dict[str, Any] = body.get("sampling_params", [body])[0]
    assert params["top_k"] == (told or everything)
