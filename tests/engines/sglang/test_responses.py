"""Responses of SGLang's server, from its own source, and the fields the client reads."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tinkercloud_testing.sglang.engine import FakeSglang
from tinkercloud_testing.sglang.sampling import (
    NEVER,
    PROMPTS,
    a_sampler,
    a_whole_model,
    an_adapter,
    publish,
    servers_of,
)
from tinkercloud_testing.sglang.server import SglangServer, UnknownEndpoint
from tinkercloud_testing.training.engines import Engine, a_sampling_request
from tinkercloud_worker.engine.sampling.sampler_interface import PromptLogprobParams
from tinkercloud_worker.inference.client import InferenceClient, Json

pytestmark = pytest.mark.slow

GROUP = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}


class Watched(dict[str, Any]):
    """An object in a response, which records the fields that are read."""

    def __init__(self, known: Json, found: set[str], missed: set[str]) -> None:
        super().__init__(known)
        self._found, self._missed = found, missed

    def __getitem__(self, key: str) -> Any:
        return watched(self._seen(key), self._found, self._missed)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else self._seen(key, default)

    def _seen(self, key: str, default: Any = None) -> Any:
        (self._found if key in self else self._missed).add(key)
        return super().get(key, default)


def watched(value: Any, found: set[str], missed: set[str]) -> Any:
    if isinstance(value, list):
        return [watched(each, found, missed) for each in value]
    return Watched(value, found, missed) if isinstance(value, dict) else value


async def test_the_client_only_reads_fields_that_sglang_returns(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()
    missed: set[str] = set()
    read = InferenceClient._read
    monkeypatch.setattr(
        InferenceClient,
        "_read",
        lambda client, *answer: watched(read(client, *answer), found, missed),
    )
    sampler = a_sampler(fakes[:1], tmp_path, colocated=True)
    targets = np.array([[3, 4], [-1, 5], [6, 7], [1, 2], [8, -1]])
    prompt_logprobs = PromptLogprobParams(logprobs_from=1, top_k=2, targets=targets)
    versions = {"base": None, "one": an_adapter(engine, 1), "sharp": a_whole_model(engine, 3.0)}
    for version, weights in versions.items():
        await publish(engine, sampler, version, weights)
        await sampler.sample(version, a_sampling_request(PROMPTS[0], stop=NEVER, top_logprobs=2))
        await sampler.sample(
            version, a_sampling_request(PROMPTS[2], prompt_logprobs=prompt_logprobs)
        )
    async with sampler.training():
        pass
    [running] = servers_of(sampler).values()
    await running.dialect.check_health()
    await sampler.retire("one")
    await sampler.close()

    assert missed == set()
    assert found >= {
        *("model_path", "weight_version", "is_generation", "tp_size", "meta_info"),
        *("finish_reason", "type", "output_token_logprobs", "output_top_logprobs"),
        *("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"),
        "cached_tokens",
    }


async def test_memory_commands_have_empty_responses(engine: Engine, model_folder: Path) -> None:
    server = SglangServer(FakeSglang(engine, model_folder), "model")

    for verb in ("release", "resume"):
        body = {"tags": ["weights"]}
        reply = await server.answer("POST", f"/{verb}_memory_occupation", body)
        assert (reply.status_code, reply.content) == (200, None)


async def test_unknown_paths_methods_and_fields_are_rejected(
    engine: Engine, model_folder: Path
) -> None:
    server = SglangServer(FakeSglang(engine, model_folder), "model")

    with pytest.raises(UnknownEndpoint, match="does not serve POST /load_adapter"):
        await server.answer("POST", "/load_adapter", {})
    with pytest.raises(UnknownEndpoint, match="does not serve GET /begin_weight_update"):
        await server.answer("GET", "/begin_weight_update", {})
    with pytest.raises(ValidationError, match="upsert"):
        await server.answer("POST", "/begin_weight_update", {"upsert": True})


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        ("/begin_weight_update", {}, {"success": True}),
        ("/init_weights_update_group", GROUP, {"success": True, "message": "", "words": ""}),
        ("/unload_lora_adapter", {"lora_name": "one"}, {"success": True, "loaded_adapters": 3}),
        ("/update_weights_from_disk", {"model_path": "a"}, {"success": 1, "message": ""}),
        ("/release_memory_occupation", {}, {"success": True}),
    ],
)
async def test_simulated_processes_return_the_types_that_sglang_expects(
    engine: Engine,
    model_folder: Path,
    path: str,
    body: dict[str, Any],
    wrong: dict[str, Any],
) -> None:
    async def answer_wrongly(_: object) -> dict[str, Any]:
        return wrong

    fake = FakeSglang(engine, model_folder)
    server = SglangServer(fake, "model")
    server._manager.pending_lora_unloads["one"] = "id"
    asked = "update_lora_adapter" if "lora" in path else path.removeprefix("/")
    setattr(fake, asked, answer_wrongly)

    # SGLang itself responds to some errors of its processes.
    with suppress(ValidationError):
        await server.answer("POST", path, body)

    assert len(fake.faults) == 1
    assert "validation error" in fake.faults[0]
