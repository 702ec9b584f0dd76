"""SGLang engines as the sampler: requests to them, and what happens when they fail.

The engines are SGLang's own HTTP server, cut out of its source, over our torch sampler: so what is
drawn is compared with that sampler's, and SGLang itself refuses what it does not know.
`python -m benchmarks.gpu` asks all of SGLang.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase

from tinkercloud_testing.sglang.engine import (
    FakeSglang,
    a_fake_sglang,
)
from tinkercloud_testing.sglang.sampling import a_sampler
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.training.engines import Engine, an_engine
from tinkercloud_worker import metrics
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang import engine_adapters as sglang_adapters
from tinkercloud_worker.inference.sglang import weights as sglang_weights


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def _counters() -> None:
    """Reset the metrics: an earlier engine may have had the same port."""
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            metric.clear()


@pytest.fixture
def _all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat weights of a kilobyte as large."""
    monkeypatch.setattr(sglang_adapters, "_MAX_SENT_BYTES", 1000)
    monkeypatch.setattr(sglang_weights, "_MAX_SENT_BYTES", 1000)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with an_engine(tiny_llama(), tmp_path / "engine") as running:
        yield running


@pytest.fixture
async def fakes(engine: Engine, model_folder: Path) -> AsyncIterator[list[FakeSglang]]:
    """Two engines."""
    async with AsyncExitStack() as stack:
        contexts = [a_fake_sglang(engine, model_folder) for _ in range(2)]
        yield [await stack.enter_async_context(context) for context in contexts]


@pytest.fixture
async def sampler(fakes: list[FakeSglang], tmp_path: Path) -> AsyncIterator[InferenceSampler]:
    running = a_sampler(fakes, tmp_path)
    yield running
    await running.close()
