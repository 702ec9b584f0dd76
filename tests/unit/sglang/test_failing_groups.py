"""Error messages of a failing process group with an engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.device.accelerator import Backend
from tinkercloud_worker.inference.client import InferenceClient, Json, ServerError
from tinkercloud_worker.inference.sglang.process_group import SglangGroup
from tinkercloud_worker.inference.weight_host import HeadWeightHost
from tinkercloud_worker.inference.weights_folder import SavedWeights


class OurRank:
    """A rank that has joined, and offers a part, or fails."""

    def __init__(self, error: str | None) -> None:
        self.error = error
        self.is_over = False

    async def has_ended(self) -> bool:
        """Return whether it has ended."""
        return self.is_over

    def send(self, line: Json) -> None:
        """Take what is to be sent."""

    async def receive(self, seconds: float) -> dict[str, Any]:
        """Return the part, or raise."""
        if self.error is not None:
            raise ServerError(self.error)
        return {"names": [], "dtypes": [], "shapes": []}

    def failure(self, reason: str) -> ServerError:
        """Return what to raise."""
        return ServerError(reason)

    async def kill(self) -> None:
        """End."""
        self.is_over = True


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    return "NCCL here is 2.29.7"


def a_group(backend: Backend, rank: OurRank, monkeypatch: pytest.MonkeyPatch) -> SglangGroup:
    client = InferenceClient("http://engine:30000", key=None, max_concurrent=1)

    async def refuse(*_: object, **__: object) -> Json:
        raise InvalidRequest("NCCL error: invalid usage")

    monkeypatch.setattr(client, "post", refuse)
    group = SglangGroup(client, backend, HeadWeightHost())
    group._rank = rank
    return group


@pytest.mark.parametrize("error", [None, "invalid usage"], ids=["the engine's side", "ours"])
async def test_a_failed_broadcast_reports_the_nccl_version_on_either_side(
    error: str | None, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = OurRank(error)
    group = a_group("nccl", rank, monkeypatch)

    with pytest.raises((InvalidRequest, ServerError), match="invalid usage") as refusal:
        await group.send(SavedWeights("model", Path("model"), None), 1)

    assert version in str(refusal.value)
    assert isinstance(refusal.value, ServerError if error else InvalidRequest)
    assert rank.is_over


async def test_a_failure_over_gloo_does_not_mention_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    group = a_group("gloo", OurRank("connection closed"), monkeypatch)

    with pytest.raises(ServerError) as failure:
        await group.send(SavedWeights("model", Path("model"), None), 1)

    assert "NCCL" not in str(failure.value)
