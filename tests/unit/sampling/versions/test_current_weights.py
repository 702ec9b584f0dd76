"""Samples of a model's current weights, without saving them first."""

import asyncio
from pathlib import Path

import pytest

from tinkercloud_protocol.heads.launch import Limits
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.ids import (
    CURRENT_WEIGHTS,
    ModelId,
    SamplingSessionId,
    model_of_sampler,
)
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head, samplers_of

CURRENT = CURRENT_WEIGHTS + MODEL.index


def published(head: Head) -> list[str]:
    """Return the versions that the head keeps of current weights."""
    return sorted(samplers_of(head).current.names)


def test_the_session_of_current_weights_is_derived_from_the_model() -> None:
    session = SamplingSessionId.of_current_weights(ModelId("s", 7))

    assert SamplingSessionId.parse(str(session)).model == ModelId("s", 7)
    assert model_of_sampler(str(session)) == "s:train:7"
    assert [model_of_sampler(name) for name in ("s:sample:7", "s:train:7", "x")] == [None] * 3


async def test_a_sample_uses_the_weights_after_the_requests_before_it(tmp_path: Path) -> None:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        head.apply(2)
        sample = head.sample(CURRENT, 0)
        await asyncio.sleep(0)
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 3, sampling_session_seq_id=0)
        for seq_id in range(4, 20, 2):
            head.add(seq_id)
            head.apply(seq_id + 1)
        result = await head.service.retrieve(sample)
        await head.answer(3)

        assert result is not None
        assert result.content_type == future_responses.PROTOBUF, result.body
        assert await head.drawn(CURRENT, 0) == await head.drawn(0, 1)
        await head.answer(19)
        assert await head.drawn(CURRENT, 1) != await head.drawn(0, 1)


async def test_weights_are_published_once_per_change_and_retired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1") as head:
        retired, retire = [], head.backend.sampler.retire

        async def record(version: str) -> None:
            retired.append(version)
            await retire(version)

        monkeypatch.setattr(head.backend.sampler, "retire", record)
        await head.begin()
        await asyncio.gather(*[head.drawn(CURRENT, seq_id) for seq_id in range(5)])
        first = published(head)
        head.add(1)
        head.apply(2)
        await head.drawn(CURRENT, 5)

        assert len(first) == len(published(head)) == 1
        assert first != published(head)
        assert retired == first
        await head.service.delete_model(MODEL)
        assert published(head) == []
        assert len(retired) == 2


async def test_current_weights_are_not_evicted(tmp_path: Path) -> None:
    limits = Limits(max_snapshot_bytes=1)
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1", limits=limits) as head:
        await head.begin()
        await head.drawn(CURRENT, 0)
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=0)
        await head.answer(1)

        assert await head.drawn(0, 0)
        assert await head.drawn(CURRENT, 1)


async def test_a_suspended_model_can_be_sampled(tmp_path: Path) -> None:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1", drain_seconds=0.01) as head:
        await head.begin()
        head.add(1)
        head.apply(2)
        drawn = await head.drawn(CURRENT, 0)
        assert await head.service.suspend_model(MODEL)
        assert published(head) == []

        await head.service.recall(f"s:sample:{CURRENT}")
        assert await head.drawn(CURRENT, 1) == drawn
        await head.service.suspend()
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g2") as head:
        await head.resume("g1")

        assert await head.drawn(CURRENT, 2) == drawn


async def test_samples_of_an_unknown_model_fail(tmp_path: Path) -> None:
    unknown = SamplingSessionId.of_current_weights(ModelId("s", 9))
    with (
        a_head((tmp_path / "store").as_uri(), tmp_path, "g1") as head,
        pytest.raises(NotFound, match="'s:train:9' does not exist"),
    ):
        async with samplers_of(head).sampling(unknown):
            pass
