"""A head that saves a model has it in memory once while the store takes its time."""

import asyncio
from pathlib import Path
from weakref import ref

import pytest

from tinkercloud_protocol import routes
from tinkercloud_protocol.checkpoints import Manifest
from tinkercloud_testing.bare_heads import MODEL, a_head
from tinkercloud_testing.waiting import wait_until
from tinkercloud_worker.engine.trainer import TrainingState


async def test_a_state_is_let_go_of_once_it_is_encoded_however_long_the_store_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1") as head:
        await head.begin()
        export_state, write = head.trainer.export_state, head.store.write
        exported, arrived, go_on = [], asyncio.Event(), asyncio.Event()

        def export(model_id: str) -> TrainingState:
            state = export_state(model_id)
            exported.extend(ref(tensor) for tensor in (state.moments or {}).values())
            return state

        async def write_slowly(*args, **kwargs) -> Manifest:
            arrived.set()
            await go_on.wait()
            return await write(*args, **kwargs)

        monkeypatch.setattr(head.trainer, "export_state", export)
        monkeypatch.setattr(head.store, "write", write_slowly)
        head.send(routes.SAVE_WEIGHTS, 1, path="first")
        await arrived.wait()

        assert exported
        # Threads let go of what they have done a moment later.
        wait_until(lambda: all(tensor() is None for tensor in exported), "letting go", seconds=20)
        go_on.set()
        assert f"{MODEL}/weights/first".encode() in await head.answer(1)
