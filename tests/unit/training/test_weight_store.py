"""Whole models that several savers publish at once, at the memory of rank 0's machine."""

import asyncio
import time
from pathlib import Path
from threading import Lock

import pytest

from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.sglang.sampling import MODEL
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_worker.actors.shares import Shares
from tinkercloud_worker.actors.weight_store import WeightStore, WeightStoreConfig
from tinkercloud_worker.engine.ranks import Outline
from tinkercloud_worker.engine.trainer import WeightsCopy

TENSORS = dict(tiny_llama().state_dict())
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())


def exported() -> Shares:
    """Return what one rank has exported of all weights; assembling it is replaced."""
    return Shares.of([(Outline(None, step=1, shared_bytes=SIZE), [object()])])


def a_store(tmp_path: Path, max_bytes: int) -> WeightStore:
    base = save(tiny_llama(), tmp_path / "base")
    return WeightStore(WeightStoreConfig(tmp_path / "models", max_bytes, base, MODEL), {})


async def test_a_model_that_does_not_fit_is_refused_before_it_is_assembled(tmp_path: Path) -> None:
    shares = exported()

    with pytest.raises(Unavailable, match=rf"storing {SIZE} bytes in addition to 0"):
        await a_store(tmp_path, SIZE - 1).write(shares)

    assert len(shares.parts) == 1


async def test_models_that_are_published_at_once_are_in_memory_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, held, most = Lock(), 0, 0

    def assembled(_: Shares) -> WeightsCopy:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
        # Time for another one, which would be started at once.
        time.sleep(0.1)
        with lock:
            held -= 1
        return WeightsCopy(None, TENSORS)

    monkeypatch.setattr(Shares, "weights", assembled)
    store = a_store(tmp_path, 3 * SIZE)

    models = await asyncio.gather(*[store.write(exported()) for _ in range(3)])

    assert most == 1
    assert len({model.name for model in models}) == 3
    with pytest.raises(Unavailable, match=f"in addition to {3 * SIZE} would exceed"):
        await store.write(exported())
    await store.close()
