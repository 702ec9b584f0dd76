"""A training checkpoint includes the unapplied gradient, or saving it fails."""

from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.heads.checkpoint_manifest import GRADIENT, CheckpointManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head
from tinkercloud_worker.engine.trainer import GradientLost

SPECS = {
    "an adapter": ModelSpec(owner="me", lora=LoraConfig(rank=2, seed=1)),
    "a whole model": ModelSpec(owner="me", lora=None),
}
WITHIN = f"tinker://{MODEL}/weights/within"


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


async def saved(head: Head, seq_id: int, name: str) -> CheckpointManifest:
    """Save a training checkpoint; return its manifest."""
    head.send(routes.SAVE_WEIGHTS, seq_id, path=name)
    await head.answer(seq_id)
    return await head.backend.store.manifest(
        CheckpointPath.parse(f"tinker://{MODEL}/weights/{name}")
    )


async def last_weights(head: Head) -> dict[str, memoryview]:
    paths = await head.service.checkpoint()
    _, files = await head.backend.store.read(CheckpointPath.parse(paths[-1]))
    return files


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
async def test_a_run_resumed_within_a_step_is_bitwise_equal_to_the_uninterrupted_one(
    root: str, tmp_path: Path, spec: ModelSpec
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.service.create_model(MODEL, spec)
        head.add(1)
        head.apply(2)
        head.add(3, first=50)
        assert GRADIENT in (await saved(head, 4, "within")).files
        head.add(5, first=60)
        head.apply(6)
        loss = await head.loss(5)
        await head.answer(6)
        expected = await last_weights(head)

    with a_head(root, tmp_path, "g2") as after:
        restored = spec.model_copy(update={"restore_from": WITHIN, "restore_optimizer": True})
        await after.service.create_model(MODEL, restored)
        after.add(1, first=60)
        after.apply(2)
        assert await after.loss(1) == loss
        await after.answer(2)

        assert await last_weights(after) == expected


async def test_a_checkpoint_between_steps_has_no_gradient(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        within = await saved(head, 2, "within")
        head.apply(3)
        after = await saved(head, 4, "after")

    assert (GRADIENT in within.files, GRADIENT in after.files) == (True, False)


async def test_the_gradient_of_a_partly_failed_step_is_not_saved(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("not now")

    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        with monkeypatch.context() as patched:
            patched.setattr(head.backend.trainer, "discard_gradient", fail)
            head.send_broken(2)
            await head.answer(2)

        assert GRADIENT not in (await saved(head, 3, "after-a-failure")).files


async def test_a_loaded_gradient_is_kept_after_an_earlier_failed_step(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("not now")

    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        await saved(head, 2, "within")
        with monkeypatch.context() as patched:
            patched.setattr(head.backend.trainer, "discard_gradient", fail)
            head.send_broken(3)
            await head.answer(3)
        head.send(routes.LOAD_WEIGHTS, 4, path=WITHIN, optimizer=True)
        head.apply(5)

        metrics = orjson.loads(await head.answer(5))["metrics"]
        assert metrics["step"] == 1
        assert metrics["grad_norm"] > 0


async def test_saving_a_model_with_a_lost_gradient_reports_the_loss(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(_: str) -> None:
        raise GradientLost("rank 1 of 2 died")

    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        with monkeypatch.context() as patched:
            patched.setattr(head.backend.trainer, "export_gradient", lose)
            head.send(routes.SAVE_WEIGHTS, 2, path="incomplete")
            assert b"rank 1 of 2 died" in await head.answer(2)

        path = CheckpointPath.parse(f"tinker://{MODEL}/weights/incomplete")
        assert await head.backend.store.find(path) is None


async def test_the_last_checkpoint_of_a_deleted_session_has_no_gradient(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        await head.answer(1)

        assert GRADIENT not in await last_weights(head)
