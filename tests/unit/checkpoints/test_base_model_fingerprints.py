"""A checkpoint is not loaded on a different base model that was put in place of its own."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from tinkercloud_protocol.adapters.fingerprints import BaseFingerprint
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    decode_manifest,
    encode_manifest,
)
from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, ModelSpec, SamplerSpec
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_testing.serving.bare_heads import MODEL, SPEC, Head
from tinkercloud_testing.small_models.families import ONE_BY_ONE, SLOTTED, VISION_LANGUAGE
from tinkercloud_testing.small_models.models import in_dtype, save, tiny_llama, tiny_qwen3
from tinkercloud_testing.small_models.quantizing import quantize
from tinkercloud_worker.head.order import requests
from tinkercloud_worker.head.serve.service import HeadService
from tinkercloud_worker.model.fingerprint import fingerprint_of
from tinkercloud_worker.run_head import build_backend

SAVED = f"tinker://{MODEL}/weights/one"
CHILD = ModelId("s", 7)
UP = "model.layers.1.mlp.up_proj.weight"


@contextmanager
def a_head(model: Path, folder: Path, generation: str) -> Iterator[Head]:
    """Run the head of a model's folder in this process."""
    config = HeadConfig(
        head="h",
        generation=generation,
        model=BaseModelSource(name="tiny", path=str(model)),
        token_file="",
        checkpoint_root=(folder / "store").as_uri(),
        scratch_dir=str(folder / generation),
    )
    backend = build_backend(config)
    service = HeadService(backend)
    yield Head(service, backend)
    service.close()
    backend.thread.stop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tiny_llama(), tmp_path / "model")


def trained_further(model: Path) -> Path:
    """Replace the weights in the folder, as for a newer revision under the same name."""
    tensors = load_file(model / "model.safetensors")
    tensors[UP] = tensors[UP] + 1e-3
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def stretched(model: Path) -> Path:
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20000.0
    (model / "config.json").write_text(json.dumps(config))
    return model


async def a_saved_run(model: Path, folder: Path, spec: ModelSpec = SPEC) -> None:
    with a_head(model, folder, "g1") as head:
        await head.service.create_model(MODEL, spec)
        head.add(1)
        head.apply(2)
        head.send(routes.SAVE_WEIGHTS, 3, path="one")
        assert b"tinker://" in await head.answer(3)
        manifest = await head.backend.store.manifest(CheckpointPath.parse(SAVED))
        assert manifest.base_fingerprint == head.service.status().base_fingerprint
        assert manifest.base_fingerprint == fingerprint_of(str(model))


async def loaded(head: Head, spec: ModelSpec = SPEC) -> str:
    """Create a model from a saved checkpoint and return the result."""
    asked = spec.model_copy(update={"restore_from": SAVED, "restore_optimizer": True})
    await head.service.create_model(CHILD, asked)
    result = await head.service.retrieve(f"{CHILD}:0")
    assert result is not None
    return result.body.decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [(trained_further, "weights differ"), (stretched, "config.json differs")],
)
async def test_an_adapter_is_loaded_only_where_its_base_is_served(
    model: Path, tmp_path: Path, change: Callable[[Path], Path], message: str
) -> None:
    await a_saved_run(model, tmp_path)
    copied = shutil.copytree(model, tmp_path / "elsewhere")

    with a_head(copied, tmp_path, "g2") as head:
        assert "error" not in await loaded(head)
    with a_head(change(model), tmp_path, "g3") as head:
        assert re.search(f"{SAVED} can't be loaded: .*{message}", await loaded(head))


async def test_weights_are_loaded_into_a_running_model_and_sampled_only_on_their_base(
    model: Path, tmp_path: Path
) -> None:
    await a_saved_run(model, tmp_path)

    with a_head(trained_further(model), tmp_path, "g2") as head:
        await head.service.create_model(CHILD, SPEC)
        body = {"model_id": str(CHILD), "seq_id": 1, "path": SAVED, "optimizer": False}
        head.service.submit(requests.receive_json(routes.LOAD_WEIGHTS, orjson.dumps(body)))
        result = await head.service.retrieve(f"{CHILD}:1")
        head.service.register_sampler(
            SamplingSessionId("s", 3), SamplerSpec(owner="me", model_path=SAVED)
        )
        drawn = await head.service.retrieve(head.sample(3, 1))

    assert result is not None
    assert drawn is not None
    assert b"can't be loaded: the base model's weights differ" in result.body
    assert b"can't be sampled from: the base model's weights differ" in drawn.body


async def test_a_full_fine_tune_requires_only_the_architecture_of_its_base(
    model: Path, tmp_path: Path
) -> None:
    whole = ModelSpec(owner="me", lora=None)
    await a_saved_run(model, tmp_path, whole)

    with a_head(trained_further(model), tmp_path, "g2") as head:
        assert "error" not in await loaded(head, whole)
    with a_head(stretched(model), tmp_path, "g3") as head:
        assert "config.json differs" in await loaded(head, whole)


async def test_checkpoints_without_fingerprints_are_loaded(model: Path, tmp_path: Path) -> None:
    await a_saved_run(model, tmp_path)
    (file,) = (tmp_path / "store").rglob("weights/one/manifest.json")
    manifest = decode_manifest(CheckpointManifest, file.read_bytes(), "one")
    file.write_bytes(encode_manifest(manifest.model_copy(update={"base_fingerprint": None})))

    with a_head(trained_further(model), tmp_path, "g2") as head:
        assert "error" not in await loaded(head)


async def test_a_suspended_run_waits_for_its_base(model: Path, tmp_path: Path) -> None:
    with a_head(model, tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        head.apply(2)
        await head.answer(2)
        await head.service.suspend()
    kept = shutil.copytree(model, tmp_path / "kept")

    refusal = pytest.raises(InvalidRequest, match=r"can't be resumed: .*weights differ")
    with a_head(trained_further(model), tmp_path, "g2") as head, refusal:
        await head.resume("g1")
    with a_head(kept, tmp_path, "g3") as head:
        await head.resume("g1")
        head.add(3)
        assert await head.loss(3) > 0


FAMILIES = SLOTTED | ONE_BY_ONE | VISION_LANGUAGE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_saved_in_more_files_has_the_same_fingerprint(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "one")

    again = type(model).from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "many", max_shard_size="20KB")

    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert fingerprint_of(str(tmp_path / "many")) == fingerprint_of(str(tmp_path / "one"))


def without_effect(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {"transformers_version": "9.9", "use_cache": False, "_name_or_path": "x"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer_config.json").write_text("{}")
    tied = load_file(model / "model.safetensors")
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"].clone()
    save_file(tied, model / "model.safetensors", {"format": "pt"})


def test_changes_that_do_not_affect_logits_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    model = save(tiny_qwen3(), tmp_path)
    before = fingerprint_of(str(model))

    without_effect(model)

    assert fingerprint_of(str(model)) == before


@pytest.mark.parametrize(
    "change",
    [
        trained_further,
        stretched,
        lambda model: quantize(model, (16, 16)),
        lambda model: save(in_dtype(tiny_llama(), torch.bfloat16), model),
        lambda model: save(tiny_llama(layers=3), model),
    ],
    ids=["weights", "positions", "float8", "bfloat16", "layers"],
)
def test_another_model_has_another_fingerprint(
    model: Path, change: Callable[[Path], object]
) -> None:
    before = fingerprint_of(str(model))

    change(model)

    assert fingerprint_of(str(model)) not in {before, None}


def test_a_single_value_of_a_small_tensor_changes_the_fingerprint(model: Path) -> None:
    before = fingerprint_of(str(model))
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][5] += 1e-6
    save_file(tensors, model / "model.safetensors", {"format": "pt"})

    assert fingerprint_of(str(model)) != before


def test_fingerprints_of_another_version_are_not_compared() -> None:
    assert BaseFingerprint.parse("2:a:b") is None
    assert BaseFingerprint.parse(str(BaseFingerprint("a", "b"))) == BaseFingerprint("a", "b")
