"""A local Ray cluster that declares more cores than the machine has."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import ray

import tinkercloud_testing
from tinkercloud_testing.ranks.ranks import Successive, TrainerOf
from tinkercloud_testing.serving.warm_python import warm_ranks
from tinkercloud_worker.actors.rank_group import GroupShape, RankGroup, connect
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.training.adam import AdamTrainer


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Ranks are processes of their own, which know nothing of pytest's paths.
    folders = [str(Path(tinkercloud_testing.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    with warm_ranks(tmp_path_factory.mktemp("warm")) as settings:
        # Heads that other tests start have ranks of their own, which begin as a user's do.
        with patch.dict(os.environ, settings):
            connect(GroupShape(ranks=4))
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def trainer_of(cluster: None) -> Iterator[TrainerOf]:
    """Return what makes trainers of a number of ranks, each in the place of the one before."""
    with ExitStack() as ending:

        @cache
        def group(ranks: int) -> RankGroup:
            started = RankGroup(GroupShape(ranks, cpus_per_rank=0.1), Successive)
            ending.callback(started.close)
            return started

        def trainer(ranks: int, factory: Callable[[], AdamTrainer]) -> RankedTrainer:
            group(ranks).call("become", factory)
            return RankedTrainer(lambda _: group(ranks))

        yield trainer
