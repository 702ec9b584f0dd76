"""Sampling sessions of a head: which requests are accepted, and which weights they use."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from tinkercloud_protocol.heads.launch import SamplerConfig, SamplerSpec
from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_protocol.wire.errors import Overloaded, ResultGone
from tinkercloud_protocol.wire.ids import SamplingSessionId
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_testing.serving.bare_heads import MODEL, SPEC, a_head, a_sample
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.engine.prompt_images import PromptImages
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest
from tinkercloud_worker.engine.sampling.sampling_request import prepare
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.head.sampling.samplers import Samplers
from tinkercloud_worker.head.serve import running_samples

SESSION = SamplingSessionId("s", 0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


async def test_a_sampling_request_is_rejected_while_the_queue_is_full(
    store: Path, tmp_path: Path
) -> None:
    with a_head(
        store.as_uri(), tmp_path, "g1", sampler=SamplerConfig(max_queued_requests=2)
    ) as head:
        head.service.register_sampler(SESSION, SamplerSpec(owner="me"))
        taken_in = [head.sample(0, seq_id) for seq_id in range(2)]

        with pytest.raises(
            Overloaded, match="2 sampling requests of owner 'me' are already queued"
        ):
            head.sample(0, 2)
        assert head.sample(0, 1) == taken_in[1]

        for request_id in taken_in:
            await head.service.retrieve(request_id)
        assert await head.drawn(0, 2)


async def test_accepted_samples_continue_in_a_head_with_a_smaller_queue(
    store: Path, tmp_path: Path
) -> None:
    with a_head(store.as_uri(), tmp_path, "g1", drain_seconds=0.001) as head:
        await head.begin()
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=0)
        await head.answer(1)
        waiting = [head.sample(0, seq_id, max_tokens=400) for seq_id in range(3)]
        await head.service.suspend()
        assert head.service.status().pending_requests == 3
        head.service.results.release()
    room = SamplerConfig(max_queued_requests=1)
    with a_head(store.as_uri(), tmp_path, "g2", sampler=room) as head:
        await head.resume("g1")

        for request_id in waiting:
            result = await head.service.retrieve(request_id)
            assert result is not None
            assert result.content_type == future_responses.PROTOBUF, result.body


async def test_samples_that_the_next_head_rejects_do_not_prevent_their_model_from_resuming(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head(store.as_uri(), tmp_path, "g1", drain_seconds=0.001) as head:
        await head.begin()
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=0)
        await head.answer(1)
        monkeypatch.setattr(running_samples, "prepare", as_an_older_head_did)
        unsound = head.sample(0, 0, max_tokens=10**6)
        of_none = a_sample(0, 1, 400).model_copy(update={"num_samples": 0})
        unreadable = str(head.service.sample(head.service.samples.prepare(of_none)))
        await head.service.suspend()
        assert head.service.status().pending_requests == 2
        head.service.results.release()
    monkeypatch.undo()
    with a_head(store.as_uri(), tmp_path, "g2") as head:
        await head.resume("g1")

        refused = await head.service.retrieve(unsound)
        assert refused is not None
        assert "max_tokens" in orjson.loads(refused.body)["error"]
        with pytest.raises(ResultGone, match="send the sampling request again"):
            await head.service.retrieve(unreadable)
        assert await head.drawn(0, 2)


def as_an_older_head_did(
    _request: SampleRequest,
    limits: ModelLimits,
    end_tokens: frozenset[int],
    random_seed: int,
    *,
    images: PromptImages,
) -> SamplingRequest:
    """Accept any request, with samples that take some time."""
    return prepare(a_sample(0, 0, 400), limits, end_tokens, random_seed, images=images)


async def test_samples_of_an_ended_session_are_cancelled(store: Path, tmp_path: Path) -> None:
    with a_head(store.as_uri(), tmp_path, "g1") as head:
        for index in range(2):
            head.service.register_sampler(SamplingSessionId("s", index), SamplerSpec(owner="me"))
        cancelled = [head.sample(0, 0, max_tokens=500)]
        await asyncio.sleep(0.1)
        cancelled.append(head.sample(0, 1, max_tokens=500))
        running = head.sample(1, 0, max_tokens=100)

        await head.service.retire_sampler(SESSION)

        for request_id in cancelled:
            result = await head.service.retrieve(request_id)
            assert result is not None
            assert orjson.loads(result.body)["error"] == "the request was cancelled"
        assert head.service.status().pending_requests == 1
        sampled = await head.service.retrieve(running)
        assert sampled is not None
        assert sampled.content_type == future_responses.PROTOBUF


async def test_loading_weights_is_retried_by_the_next_sample(store: Path, tmp_path: Path) -> None:
    with a_head(store.as_uri(), tmp_path, "g1") as head:
        await head.begin()
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, path="x")
        path = orjson.loads(await head.answer(1))["path"]
        folder = store / "runs" / str(MODEL) / "sampler_weights" / "x"
        shutil.move(folder, tmp_path / "away")
        head.service.register_sampler(SESSION, SamplerSpec(owner="me", model_path=path))

        failed = await head.service.retrieve(head.sample(0, 0))
        shutil.move(tmp_path / "away", folder)

        assert failed is not None
        assert "does not exist" in orjson.loads(failed.body)["error"]
        assert await head.drawn(0, 1)


async def test_a_session_does_not_sample_from_a_later_checkpoint_at_the_same_path(
    store: Path, tmp_path: Path
) -> None:
    with a_head(store.as_uri(), tmp_path, "g1") as head:
        await head.begin()
        saved = {"path": "x", "overwrite": True}
        head.send(routes.SAVE_WEIGHTS, 1, **saved)
        path = orjson.loads(await head.answer(1))["path"]
        first = await head.backend.store.manifest(CheckpointPath.parse(path))
        head.send(routes.SAVE_WEIGHTS, 2, **saved)
        assert b"error" not in await head.answer(2)
        second = await head.backend.store.manifest(CheckpointPath.parse(path))
        spec, others = (
            SamplerSpec(owner="me", model_path=path),
            (SamplingSessionId("s", i) for i in (1, 2)),
        )
        head.service.register_sampler(
            SESSION, spec.model_copy(update={"saved_at": first.created_at})
        )
        for other, saved_at in zip(others, (second.created_at, None), strict=True):
            head.service.register_sampler(other, spec.model_copy(update={"saved_at": saved_at}))

        refused = await head.service.retrieve(head.sample(0, 0))

        assert refused is not None
        failure = orjson.loads(refused.body)
        assert failure["category"] == "user"
        assert "are gone" in failure["error"]
        assert "create a new sampling client" in failure["error"]
        assert await head.drawn(1, 0) == await head.drawn(2, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_full_fine_tune_is_sampled_in_the_compute_dtype(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    published: list[WeightsCopy] = []

    async def publish(_version: str, weights: WeightsCopy) -> None:
        published.append(weights)

    with a_head(store.as_uri(), tmp_path, "g1") as head:
        await head.service.create_model(MODEL, SPEC.model_copy(update={"lora": None}))
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, path="x")
        path = orjson.loads(await head.answer(1))["path"]
        passes = head.backend.config.trainer.model_copy(update={"dtype": dtype})
        config = head.backend.config.model_copy(update={"trainer": passes})
        samplers = Samplers(replace(head.backend, config=config))
        monkeypatch.setattr(head.backend.sampler, "publish", publish)

        samplers.register(SESSION, SamplerSpec(owner="me", model_path=path))
        async with samplers.sampling(SESSION):
            [sampled] = published

        saved = head.backend.trainer.copy_weights(str(MODEL)).tensors
        assert sampled.tensors.keys() == saved.keys()
        for name, tensor in saved.items():
            assert sampled.tensors[name].dtype == getattr(torch, dtype)
            assert torch.equal(sampled.tensors[name], tensor.to(getattr(torch, dtype))), name
