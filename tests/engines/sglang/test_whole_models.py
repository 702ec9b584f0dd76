"""Full models: alternating with the base, sent in parts or read from a folder."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.sglang.engine import FakeSglang, a_fake_sglang
from tinkercloud_testing.sglang.sampling import (
    FOLDER,
    NEVER,
    PROMPTS,
    WHOLE,
    a_sampler,
    a_whole_model,
    an_adapter,
    assert_same,
    assert_sampled,
    publish,
)
from tinkercloud_testing.small_models.models import (
    save,
    tiny_deepseek_v3,
    tiny_mixtral,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.engines import Engine, a_sampling_request, an_engine
from tinkercloud_testing.training.trainers import assert_equal
from tinkercloud_worker.inference.client import ServerError
from tinkercloud_worker.inference.sglang import weights as sglang_weights

pytestmark = pytest.mark.slow

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")


@pytest.mark.parametrize("state", [{}, {"tp_size": 2}, {"refuses": frozenset({WHOLE})}])
async def test_full_models_alternate_with_the_base_on_one_engine(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, state: dict[str, object]
) -> None:
    vars(fakes[0]).update(state)
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "base", None)
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    await publish(engine, sampler, "flat", a_whole_model(engine, 0.3))
    await publish(engine, sampler, "adapted", an_adapter(engine, 1))
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    versions = ["base", "sharp", "adapted", "flat", "sharp", "base"]

    theirs = await asyncio.gather(*[sampler.sample(version, request) for version in versions])

    for version, their in zip(versions, theirs, strict=True):
        assert_same(their, await engine.sampler.sample(version, request))
    assert all(body["flush_cache"] for path in (WHOLE, FOLDER) for body in fakes[0].called(path))
    await sampler.close()


async def test_a_full_model_is_sent_in_parts_to_an_engine_without_access_to_the_files(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = a_whole_model(engine, 3.0)
    monkeypatch.setattr(sglang_weights, "_BUCKET_BYTES", weights.size_bytes // 4)
    # An earlier process ended in the middle of an update.
    fakes[0].is_updating = True
    sampler = a_sampler(fakes[:1], tmp_path, adapters_seen=False)
    await publish(engine, sampler, "sharp", weights)
    request = a_sampling_request(PROMPTS[0], stop=NEVER)

    theirs = await sampler.sample("sharp", request)

    assert_same(theirs, await engine.sampler.sample("sharp", request))
    assert len(fakes[0].called(WHOLE)) >= 4
    assert fakes[0].called(FOLDER) == []
    assert not fakes[0].is_updating
    await sampler.close()


@pytest.mark.usefixtures("_all_is_large")
async def test_a_large_model_is_read_from_its_folder(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path)

    await sampler.publish("sharp", a_whole_model(engine, 3.0))

    assert fakes[0].called(WHOLE) == []
    assert len(fakes[0].called(FOLDER)) == 1
    await sampler.close()


async def test_partially_updated_weights_are_never_sampled_from(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    fakes[0].refuses = frozenset({"/end_weight_update"})
    sampler = a_sampler(fakes[:1], tmp_path, adapters_seen=False)
    await publish(engine, sampler, "base", None)
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    await sampler.sample("base", request)
    with pytest.raises(ServerError, match=r"failed \(HTTP 500\): refused"):
        await sampler.publish("sharp", a_whole_model(engine, 3.0))

    theirs = await sampler.sample("base", request)

    assert_same(theirs, await engine.sampler.sample("base", request))
    assert [Path(body["model_path"]) for body in fakes[0].called(FOLDER)][-1] == fakes[0].model_path
    await sampler.close()


async def test_an_engine_that_has_lost_a_full_model_reloads_it(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path
) -> None:
    sampler = a_sampler(fakes[:1], tmp_path)
    await publish(engine, sampler, "sharp", a_whole_model(engine, 3.0))
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    fakes[0].restart()

    theirs = await sampler.sample("sharp", request)

    assert_same(theirs, await engine.sampler.sample("sharp", request))
    await sampler.close()


@pytest.mark.parametrize("left", ["sharp", "base"])
async def test_a_head_replaces_weights_that_another_head_loaded(
    engine: Engine, fakes: list[FakeSglang], tmp_path: Path, left: str
) -> None:
    request = a_sampling_request(PROMPTS[0], stop=NEVER)
    first = a_sampler(fakes[:1], tmp_path / "first")
    await publish(engine, first, "sharp", a_whole_model(engine, 3.0))
    await first.publish("base", None)
    await first.sample(left, request)
    second = a_sampler(fakes[:1], tmp_path / "second", generation="g2")
    await second.publish("base", None)

    theirs = await second.sample("base", request)

    assert_same(theirs, await engine.sampler.sample("base", request))
    await asyncio.gather(first.close(), second.close())


@pytest.mark.parametrize("make", [tiny_qwen3_moe, tiny_mixtral, tiny_deepseek_v3])
@pytest.mark.parametrize(
    ("refuses", "targets"),
    [(frozenset(), ATTENTION), (frozenset(), None), (frozenset({WHOLE}), ["up_proj"])],
    ids=["sent", "without adapters", "read"],
)
async def test_a_full_mixture_model_is_sent_with_the_tensor_names_of_its_files(
    tmp_path: Path,
    make: Callable[[], PreTrainedModel],
    refuses: frozenset[str],
    targets: Sequence[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So small that hardly any two tensors share a part.
    monkeypatch.setattr(sglang_weights, "_BUCKET_BYTES", 1)
    folder = save(make(), tmp_path / "model")
    with an_engine(make(), tmp_path / "engine") as engine:
        async with a_fake_sglang(engine, folder) as fake:
            fake.refuses = refuses
            fake.lora_target_modules = targets
            weights = a_whole_model(engine, 3.0)
            for tensor in weights.tensors.values():
                others = [1] * (tensor.ndim - 1)
                tensor.mul_(torch.linspace(0.5, 1.5, len(tensor)).view(-1, *others))
            sampler = a_sampler([fake], tmp_path)
            for version, published in {"base": None, "sharp": weights}.items():
                await publish(engine, sampler, version, published)

                await assert_sampled(engine, sampler, version)

            exported = await sampler.export("sharp")
            assert exported is not None
            assert_equal(exported.tensors, weights.tensors, atol=0)
            assert any(tensor.ndim == 3 for tensor in weights.tensors.values())
            await sampler.close()


@pytest.mark.parametrize("targets", [("all",), ("q_proj", "up_proj", "down_proj")])
async def test_a_full_mixture_model_is_rejected_if_sglang_would_not_update_its_experts(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    folder = save(tiny_qwen3_moe(), tmp_path / "model")
    with an_engine(tiny_qwen3_moe(), tmp_path / "engine") as engine:
        async with a_fake_sglang(engine, folder) as fake:
            fake.lora_target_modules = targets
            sampler = a_sampler([fake], tmp_path)
            await publish(engine, sampler, "base", None)
            await publish(engine, sampler, "adapted", an_adapter(engine, 1))

            with pytest.raises(InvalidRequest, match=r"sampler\.engines\.loraTargetModules"):
                await sampler.publish("whole", a_whole_model(engine, 3.0))

            for version in ("base", "adapted"):
                await assert_sampled(engine, sampler, version)
            assert fake.called(WHOLE) == fake.called(FOLDER) == []
            await sampler.close()
