"""A model that fails to restore its checkpoint does not stay in memory."""

from pathlib import Path

from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.serving.bare_heads import MODEL, a_head
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.training.adam import AdamTrainer


async def test_a_model_that_does_not_match_its_checkpoint_uses_no_memory(tmp_path: Path) -> None:
    other = ModelId("s", 1)
    spec = ModelSpec(
        owner="me", lora=LoraConfig(rank=4), restore_from=f"tinker://{MODEL}/weights/a"
    )
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1") as head:
        await head.begin()
        head.send(routes.SAVE_WEIGHTS, 1, path="a")
        await head.answer(1)

        await head.service.create_model(other, spec)
        failed = await head.service.retrieve(f"{other}:0")

        assert failed is not None
        assert b'"category":"user"' in failed.body
        trainer = head.backend.trainer
        assert isinstance(trainer, AdamTrainer)
        assert list(held_models(trainer)) == [str(MODEL)]
