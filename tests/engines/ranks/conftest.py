"""A Ray cluster of this machine, with more cores than it has."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import tinkercloud_testing
from tinkercloud_worker.actors.group import GroupShape, connect


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    # Ranks are processes of their own, which know nothing of pytest's paths.
    folders = [str(Path(tinkercloud_testing.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    connect(GroupShape(ranks=4))
    yield
    ray.shutdown()
