"""Full models sent from training ranks to engines: SGLang's own functions, in processes.

The session head only coordinates, and does not hold the models unless it must.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.checkpoint_manifest import FULL_WEIGHTS
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import NotFound, Unavailable
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.ranks.ranks import MeasuredTrainer, MortalTrainer
from tinkercloud_testing.sglang.engine import FakeSglang, a_fake_sglang
from tinkercloud_testing.sglang.sampling import (
    FOLDER,
    MODEL,
    WHOLE,
    a_sampler,
    a_whole_model,
    assert_sampled,
)
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import in_dtype, save, tiny_llama
from tinkercloud_testing.training.engines import Engine, an_engine
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup
from tinkercloud_worker.actors.rank_weight_host import RankWeightHost
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.actors.weight_store import WeightStoreConfig
from tinkercloud_worker.engine.trainer import GradientLost, Publication, WeightsCopy
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.weight_host import WeightHostLost
from tinkercloud_worker.inference.weights_folder import SavedWeights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

JOINED = "/init_weights_update_group"
SENT = "/update_weights_from_distributed"
STORE = "ray::WeightStore"


@dataclass(frozen=True)
class Ranks:
    """Two training ranks, and the weight store next to the first one."""

    trainer: RankedTrainer
    host: RankWeightHost
    config: WeightStoreConfig

    def kept(self) -> list[str]:
        """Return the names of the models that lie there."""
        return [path.parent.name for path in self.config.folder.glob(f"*/{FULL_WEIGHTS}")]


async def published(trainer: RankedTrainer, model_id: str) -> Publication:
    """Return what a trainer publishes of a model."""
    bring = await asyncio.to_thread(trainer.publication, model_id)
    return await asyncio.to_thread(bring)


@dataclass(frozen=True)
class Engines:
    """An engine that draws, what it is compared with, and the head's side of it."""

    ours: Engine
    theirs: FakeSglang
    sampler: InferenceSampler
    scratch: Path

    async def publish(self, ranks: Ranks, version: str, scale: float) -> None:
        """Have the ranks hold a model and publish it; publish the same here."""
        model = a_whole_model(self.ours, scale)
        state = replace(self.ours.trainer.export_state(f"whole-{scale}"), weights=model)
        await asyncio.to_thread(ranks.trainer.add_model, version, None)
        await asyncio.to_thread(ranks.trainer.import_state, version, state)
        await self.ours.sampler.publish(version, model)
        await self.sampler.publish(version, await published(ranks.trainer, version))

    def at_the_head(self) -> list[Path]:
        """Return the files of whole models that the head has."""
        return list(self.scratch.glob(f"**/{FULL_WEIGHTS}"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    config = WeightStoreConfig(
        tmp_path_factory.mktemp("ranks") / "models", 1 << 30, model_folder, MODEL
    )
    host = RankWeightHost(config)
    trainer = RankedTrainer(lambda _: RankGroup(GroupShape(ranks=2), MortalTrainer), host)
    yield Ranks(trainer, host, config)
    last = senders()
    trainer.close()
    assert not config.folder.exists()
    wait_until(lambda: not any(each.is_running() for each in last), "senders end with it")


def senders() -> list[psutil.Process]:
    """Return the processes of this machine that send models from a store to engines."""
    stores = [each for each in psutil.process_iter(["name"]) if STORE in each.info["name"]]
    return [child for store in stores for child in store.children()]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@asynccontextmanager
async def engines(ranks: Ranks, folder: Path) -> AsyncIterator[Engines]:
    with an_engine(tiny_llama(), folder / "engine") as ours:
        async with a_fake_sglang(ours, ranks.config.base_path) as theirs:
            sampler = a_sampler([theirs], folder, weight_host=ranks.host, process_group="gloo")
            try:
                yield Engines(ours, theirs, sampler, folder / "scratch")
            finally:
                await sampler.close()


async def test_published_weights_go_from_ranks_to_an_engine_without_the_head(
    ranks: Ranks, tmp_path: Path
) -> None:
    async with engines(ranks, tmp_path) as engine:
        await engine.publish(ranks, "sharp", 3.0)
        await engine.publish(ranks, "flat", 0.3)

        for version in ("sharp", "flat", "sharp"):
            await assert_sampled(engine.ours, engine.sampler, version)

        assert len(ranks.kept()) == 2
        assert engine.at_the_head() == []
        assert engine.theirs.called(FOLDER) == []
        assert engine.theirs.called(WHOLE) == []
        await engine.sampler.retire("flat")
        await asyncio.to_thread(
            wait_until, lambda: len(ranks.kept()) == 1, "what is retired goes there too"
        )
    await asyncio.to_thread(wait_until, lambda: ranks.kept() == [], "all goes with the sampler")


def a_llama_in_half() -> PreTrainedModel:
    return in_dtype(tiny_llama(), torch.bfloat16)


async def test_stored_weights_of_ranks_have_the_compute_dtype(
    model_folder: Path, tmp_path: Path
) -> None:
    host = RankWeightHost(WeightStoreConfig(tmp_path, 1 << 30, model_folder, MODEL))
    make = partial(MeasuredTrainer, 0, make=a_llama_in_half)
    trainer = RankedTrainer(lambda _: RankGroup(GroupShape(ranks=1), make), host)
    trainer.add_model("m", None)

    kept = await published(trainer, "m")

    [file] = tmp_path.glob(f"*/{FULL_WEIGHTS}")
    saved, lying = trainer.copy_weights("m"), load_file(file)
    assert kept.size_bytes < 0.6 * saved.size_bytes
    for name, tensor in saved.tensors.items():
        assert torch.equal(lying[name], tensor.to(torch.bfloat16)), name
    trainer.close()


async def test_an_engine_that_rejects_weights_from_ranks_gets_them_through_the_head(
    ranks: Ranks, tmp_path: Path
) -> None:
    async with engines(ranks, tmp_path) as engine:
        engine.theirs.refuses = frozenset({SENT})

        await engine.publish(ranks, "sharp", 3.0)

        await assert_sampled(engine.ours, engine.sampler, "sharp")
        assert len(engine.theirs.called(WHOLE)) == 1
        [file] = engine.at_the_head()
        [name] = ranks.kept()
        kept = ranks.config.folder / name
        assert {path.name for path in kept.iterdir()} == {
            path.name for path in file.parent.iterdir()
        }
        for path in kept.iterdir():
            assert path.read_bytes() == (file.parent / path.name).read_bytes()
        assert "config.json" in {path.name for path in kept.iterdir()}


async def test_weights_fetched_by_the_head_are_removed_from_the_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    """As what another head had published, and checkpoints that are sampled from."""
    async with engines(ranks, tmp_path) as engine:
        model = a_whole_model(engine.ours, 3.0)
        await engine.ours.sampler.publish("sharp", model)
        await engine.sampler.publish("sharp", model)

        await assert_sampled(engine.ours, engine.sampler, "sharp")

        assert engine.theirs.called(FOLDER) == []
        assert len(engine.theirs.called(SENT)) >= 1
        await asyncio.to_thread(wait_until, lambda: ranks.kept() == [], "nothing is left there")


async def test_engines_that_are_sent_the_heads_model_at_once_have_a_copy_each(
    ranks: Ranks, tmp_path: Path
) -> None:
    content = os.urandom(1000)
    (tmp_path / FULL_WEIGHTS).write_bytes(content)
    model = SavedWeights("model", tmp_path, None)

    async with ranks.host.weights_of(model) as one:
        async with ranks.host.weights_of(model) as other:
            assert one.read_bytes() == other.read_bytes() == content
        await asyncio.to_thread(wait_until, lambda: not other.exists(), "one is done")
        assert one.read_bytes() == content
    await asyncio.to_thread(wait_until, lambda: ranks.kept() == [], "nothing is left there")


async def test_the_weights_of_an_engine_can_be_exported(ranks: Ranks, tmp_path: Path) -> None:
    async with engines(ranks, tmp_path) as engine:
        await engine.publish(ranks, "sharp", 3.0)

        exported = await engine.sampler.export("sharp")

        expected = await engine.ours.sampler.export("sharp")
        assert exported is not None
        assert expected is not None
        assert exported.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert (exported.tensors[name] == tensor).all(), name


async def test_a_process_that_ended_between_two_models_is_replaced(
    ranks: Ranks, tmp_path: Path
) -> None:
    async with engines(ranks, tmp_path) as engine:
        await engine.publish(ranks, "sharp", 3.0)
        [sender] = senders()
        sender.kill()
        await asyncio.to_thread(wait_until, lambda: senders() == [], "it has ended")

        await engine.publish(ranks, "flat", 0.3)

        await assert_sampled(engine.ours, engine.sampler, "flat")
        assert len(engine.theirs.called(JOINED)) == 2
        assert engine.theirs.called(WHOLE) == []


async def test_adapters_still_go_through_the_head(ranks: Ranks) -> None:

    await asyncio.to_thread(ranks.trainer.add_model, "adapter", LoraConfig(rank=4))

    weights = await published(ranks.trainer, "adapter")

    assert isinstance(weights, WeightsCopy)
    assert weights.lora is not None


async def test_a_model_that_does_not_fit_on_ranks_goes_to_the_head(
    model_folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    group = ranks.trainer.group.current
    tight = RankWeightHost(replace(ranks.config, folder=tmp_path / "tight", max_bytes=1000))
    trainer = RankedTrainer(lambda _: group, tight)
    trainer.add_model("whole", None)

    weights = await published(trainer, "whole")

    assert isinstance(weights, WeightsCopy)
    assert weights.size_bytes > 1000
    # Nor is it brought back there, to be sent.
    (tmp_path / FULL_WEIGHTS).write_bytes(bytes(weights.size_bytes))
    with pytest.raises(WeightHostLost, match=r"exceed limits.max_placed_bytes \(1000\)"):
        async with tight.weights_of(SavedWeights("model", tmp_path, None)):
            pass
    tight.close()


@pytest.mark.long
async def test_lost_ranks_lose_their_published_models_and_new_ranks_publish_again(
    ranks: Ranks, tmp_path: Path
) -> None:
    async with engines(ranks, tmp_path) as engine:
        await engine.publish(ranks, "sharp", 3.0)
        ranks.trainer.group.current.call("die_in", "forward_backward", 1)
        with pytest.raises(GradientLost):
            await asyncio.to_thread(run, ranks.trainer, random_data([5, 6]), model_id="sharp")

        await engine.publish(ranks, "flat", 0.3)

        await assert_sampled(engine.ours, engine.sampler, "flat")
        assert engine.at_the_head() == []
        with pytest.raises(NotFound, match="save the weights again"):
            await assert_sampled(engine.ours, engine.sampler, "sharp")
        await assert_sampled(engine.ours, engine.sampler, "flat")


@pytest.mark.long
async def test_replacing_ranks_during_a_transfer_disables_no_transfer_path(
    ranks: Ranks, tmp_path: Path
) -> None:
    async with engines(ranks, tmp_path) as engine:
        await engine.publish(ranks, "flat", 0.3)
        async with engine.theirs.holding(SENT) as was_asked:
            publishing = asyncio.create_task(engine.publish(ranks, "sharp", 3.0))
            await was_asked.wait()
            # As when a rank is lost, and the next command starts others.
            ranks.host._group = None
            await asyncio.to_thread(ranks.host.attach_to, ranks.trainer.group.current)
        with pytest.raises(NotFound, match="save the weights again"):
            await publishing

        await engine.publish(ranks, "flatter", 0.1)

        await assert_sampled(engine.ours, engine.sampler, "flatter")
        assert len(engine.theirs.called(JOINED)) == 2
        assert engine.theirs.called(WHOLE) == []


@pytest.mark.long
async def test_weights_that_were_lost_on_their_way_can_be_saved_again(
    ranks: Ranks, tmp_path: Path
) -> None:
    async with engines(ranks, tmp_path) as engine:
        await engine.publish(ranks, "sharp", 3.0)
        bring = await asyncio.to_thread(ranks.trainer.publication, "sharp")
        ranks.trainer.group.current.call("die_in", "forward_backward", 0)
        with pytest.raises(GradientLost):
            await asyncio.to_thread(run, ranks.trainer, random_data([5, 6]), model_id="sharp")

        # They may be in the node's store for a moment longer than the rank that put them there.
        with suppress(Unavailable):
            await asyncio.to_thread(bring)

        await engine.publish(ranks, "flat", 0.3)
        await assert_sampled(engine.ours, engine.sampler, "flat")
        assert engine.at_the_head() == []


@pytest.mark.long
async def test_a_weight_store_that_dies_is_replaced_and_nothing_waits_for_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    async with engines(ranks, tmp_path) as engine:
        await engine.publish(ranks, "sharp", 3.0)
        store = ranks.host._store
        assert store is not None
        ray.kill(store)

        await engine.publish(ranks, "flat", 0.3)
        await assert_sampled(engine.ours, engine.sampler, "flat")
        assert len(engine.at_the_head()) == len(engine.theirs.called(WHOLE)) == 1
        await engine.publish(ranks, "flatter", 0.1)
        await assert_sampled(engine.ours, engine.sampler, "flatter")

        assert len(engine.at_the_head()) == len(engine.theirs.called(WHOLE)) == 1
        assert len(ranks.kept()) == 1
