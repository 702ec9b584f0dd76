"""API servers and heads of two releases: which can talk to each other, and what clients get."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadEndpoint, HeadReport, Placement, ServedModel
from tinkercloud_api.providers.cluster.head_endpoints import HeadEndpoints
from tinkercloud_api.providers.cluster.session_durability import DurabilityAnnotator
from tinkercloud_api.providers.cluster.session_status import Ready, TrainingSessionView
from tinkercloud_api.providers.head_http_client import open_client
from tinkercloud_api.providers.local.local_head import LocalHead
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.heads.launch import (
    HEAD_PROTOCOL,
    HeadStatus,
    HeldModels,
    ModelSpec,
    SamplerSpec,
    Saved,
    protocol_refusal,
)
from tinkercloud_protocol.heads.releases import Versions, this_release
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import TOKEN, ServedHead, a_served_head, served
from tinkercloud_worker.head.serve import reports

KEY = "tml-of-clients-of-two-releases"
NOW = HEAD_PROTOCOL.newest
SPOKEN = {
    # The release before, this one, the next one, and the one after that.
    Versions(NOW - 1, NOW - 1): False,
    Versions(NOW - 1, NOW): True,
    Versions(NOW, NOW + 1): True,
    Versions(NOW + 1, NOW + 2): False,
}
"""Whether this release can use a head that speaks these versions."""


async def ignore(_report: HeadReport) -> None: ...


class OfCluster(OneHead):
    """A provider that finds its head as the one of Kubernetes does."""

    def __init__(self, head: ServedHead, client: aiohttp.ClientSession) -> None:
        super().__init__()
        self._head = head
        self._session = cast("TrainingSessionView", SimpleNamespace(name="ts-1", uid="u"))
        annotator = cast("DurabilityAnnotator", SimpleNamespace(forget=str, note=str))
        self.endpoints = HeadEndpoints(cast("Any", self), client, ignore, annotator)

    async def secret(self, _name: str) -> dict[str, bytes]:
        return {"token": TOKEN.encode()}

    async def acquire(self, _placement: Placement) -> HeadEndpoint:
        return await self.endpoints.resolve(self._session, Ready(self._head.url, "pod-1"))


@dataclass
class World:
    """An API server and its head."""

    url: str
    head: ServedHead

    async def train(self) -> tuple[int, dict[str, Any]]:
        """Create a model; return the answer to a client that sends its first step."""
        session = await self._post("create_session", {"tags": [], "sdk_version": "1"})
        body = {
            "session_id": session[1]["session_id"],
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 2},
        }
        _, created = await self._post("create_model", body)
        model_id = created["request_id"].rpartition(":")[0]
        return await self._post(
            "optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}}
        )

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        url, headers = f"{self.url}/api/v1/{path}", {"x-api-key": KEY}
        async with self.head.client.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def a_world(folder: Path) -> AsyncIterator[World]:
    settings = Settings(
        state_dir=folder / "state",
        checkpoint_root=(folder / "store").as_uri(),
        bootstrap_key=KEY,
    )
    async with a_served_head(folder) as head, open_client() as client:
        provider = OfCluster(head, client)
        async with served(Application(settings, provider)) as url:
            yield World(url, head)
            await provider.endpoints.stop()


@pytest.mark.parametrize(("spoken", "is_used"), SPOKEN.items(), ids=map(str, SPOKEN))
async def test_a_head_of_the_next_release_is_used_and_others_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoken: Versions, *, is_used: bool
) -> None:
    monkeypatch.setattr(reports, "HEAD_PROTOCOL", spoken)
    monkeypatch.setattr(reports, "this_release", lambda: "7.0.0")

    async with a_world(tmp_path) as world:
        status, answer = await world.train()

    if is_used:
        assert (status, answer["request_id"].endswith(":train:0:1")) == (200, True), answer
        return
    assert (status, answer) == (
        503,
        {
            "detail": f"session head 'h' is of release 7.0.0 and speaks {spoken} of the head"
            f" protocol, but this API server is of release {this_release()} and speaks"
            f" {HEAD_PROTOCOL};"
            " upgrade the one that is older: API servers with their chart, a head by suspending"
            " and resuming TrainingSession ts-1"
        },
    )


@pytest.mark.parametrize(("spoken", "is_used"), SPOKEN.items(), ids=map(str, SPOKEN))
async def test_a_server_takes_over_a_running_head_only_if_they_speak_the_same_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoken: Versions, *, is_used: bool
) -> None:
    monkeypatch.setattr(reports, "HEAD_PROTOCOL", spoken)
    async with a_served_head(tmp_path) as running, open_client() as client:
        found = LocalHead(ServedModel("m", 8), Settings(state_dir=tmp_path), client, ignore)
        folder = found.unsaved.parent
        folder.mkdir(parents=True)
        record = {"pid": 1, "url": running.url, "generation": "g1"}
        (folder / "head.json").write_text(json.dumps(record))
        (folder / "token").write_text(TOKEN)

        await found.adopt()

        assert (found.endpoint is not None) is is_used
        if (lease := found._lease) is not None:
            lease.cancel()


@pytest.mark.parametrize(
    ("ours", "is_used"),
    [(Versions(NOW, NOW + 1), True), (Versions(NOW + 1, NOW + 2), False)],
    ids=["next release", "the one after"],
)
def test_a_later_api_server_uses_a_head_of_this_release_if_it_speaks_its_protocol(
    ours: Versions, *, is_used: bool
) -> None:
    status = a_status(protocol=HEAD_PROTOCOL)

    assert (protocol_refusal(status, ours) is None) is is_used


def test_a_head_that_names_no_version_is_from_before_the_first_release() -> None:
    assert "is of release before 0.1.0 and speaks version 0" in (protocol_refusal(a_status()) or "")


def a_status(**fields: Any) -> HeadStatus:
    return HeadStatus(
        head="h",
        generation="g",
        model_name="m",
        ready=True,
        models=[],
        samplers=0,
        pending_requests=0,
        idle_seconds=0,
        **fields,
    )


def test_what_a_head_of_a_later_release_says_in_addition_is_ignored() -> None:
    said = a_status().model_dump(mode="json") | {"mood": "good"}
    held = {"models": [{"model_id": "s:train:0", "mood": "good"}], "mood": "good"}

    assert HeadStatus.model_validate(said) == a_status()
    assert HeldModels.model_validate(held).models[0].model_id == "s:train:0"
    assert Saved.model_validate({"checkpoints": [], "mood": "good"}).checkpoints == []


def test_heads_are_sent_no_field_that_has_its_default() -> None:
    """A field that a later release adds does not reach a head of this one unless it is used."""
    model = ModelSpec(owner="me", lora=None).model_dump_json(exclude_defaults=True)
    sampler = SamplerSpec(owner="me").model_dump_json(exclude_defaults=True)

    assert json.loads(model) == {"owner": "me", "lora": None}
    assert json.loads(sampler) == {"owner": "me"}
