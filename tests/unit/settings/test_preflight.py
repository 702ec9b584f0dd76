"""Settings that can't work are found before a server starts."""

import errno
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tinkercloud_api.admin import preflight
from tinkercloud_api.admin.preflight import (
    CannotServeError,
    check,
    check_device,
    check_family,
    check_installed,
    check_memory,
    check_metrics_port,
    check_models,
    check_weights,
)
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.local.head_folder import HeadFolder, folder_of
from tinkercloud_api.providers.model_arguments import ModelNotFoundError, resolve
from tinkercloud_protocol.heads.launch import InferenceConfig, SamplerConfig, TrainerConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def a_file(values: int) -> bytes:
    """Return a safetensors file with some bytes of one tensor."""
    entry = {"dtype": "U8", "shape": [values], "data_offsets": [0, values]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / SINGLE).write_bytes(a_file(100))
    check_weights("m", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.write_bytes(a_file(100)[:-1]), "truncated or damaged"),
        (lambda f: f.write_bytes(a_file(100) + b"x"), "truncated or damaged"),
        (lambda f: f.write_bytes(a_file(100)[:20]), "its header cannot be read"),
        (lambda f: f.write_bytes(b""), "is not a safetensors file"),
        (lambda f: f.write_bytes(b"version https://git-lfs"), "is not a safetensors file"),
        (lambda f: f.unlink(), f"has no weights: neither {SINGLE} nor"),
        (lambda f: f.rename(f.with_suffix(".gguf")), "convert model.gguf with `python -m"),
    ],
)
def test_weights_that_are_not_complete_are_named(
    folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(folder / SINGLE)

    with pytest.raises(CannotServeError, match="model 'm'") as raised:
        check_weights("m", folder)

    assert message in str(raised.value)


def test_each_file_of_an_index_must_be_complete(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"v": "a.safetensors", "w": "b.safetensors"}})
    )
    with pytest.raises(CannotServeError, match=r"b\.safetensors is missing"):
        check_weights("m", folder)
    (folder / "b.safetensors").write_bytes(a_file(5))
    check_weights("m", folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(CannotServeError, match="is damaged"):
        check_weights("m", folder)


def test_weights_are_selected_in_the_order_of_heads(folder: Path) -> None:
    pickled = json.dumps({"weight_map": {"w": "pytorch_model-1.bin"}})
    (folder / "pytorch_model.bin.index.json").write_text(pickled)
    check_weights("m", folder)
    (folder / SINGLE).unlink()
    with pytest.raises(CannotServeError, match=r"pytorch_model-1\.bin is missing"):
        check_weights("m", folder)
    (folder / "pytorch_model.bin").touch()
    check_weights("m", folder)
    (folder / "a.safetensors").write_bytes(a_file(1))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "elsewhere/a.safetensors"}}))
    check_weights("m", folder)


def test_weights_that_cannot_be_read_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(CannotServeError, match=r"cannot read .*model\.safetensors .*denied"):
        check_weights("m", folder)


def test_a_folder_needs_weights_only_where_a_head_computes(tmp_path: Path) -> None:
    empty = {"m": str(tmp_path)}
    elsewhere = Settings(
        state_dir=tmp_path,
        checkpoint_root=str(tmp_path / "store"),
        trainer=TrainerConfig(backend="none"),
        sampler=SamplerConfig(
            backend="external", inference=InferenceConfig(urls=("http://127.0.0.1:1",))
        ),
    )
    check(elsewhere, empty)
    with pytest.raises(CannotServeError, match="has no weights"):
        check(elsewhere.model_copy(update={"sampler": SamplerConfig()}), empty)
    (tmp_path / SINGLE).write_bytes(a_file(1)[:-1])
    with pytest.raises(CannotServeError, match="truncated"):
        check(elsewhere, empty)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "is no JSON object"),
        ('{"text_config": 5}', "has a text_config that is no object"),
        ('{"architectures": 5}', "has architectures that are no list"),
    ],
)
def test_a_damaged_configuration_is_named(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)

    with pytest.raises(ModelNotFoundError, match=f"model 'm': .*config.json {message}"):
        resolve("m", str(folder))


def test_a_device_is_needed_only_where_a_head_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_GPU_FILES", ("/dev/no-such-gpu",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_device(Settings())
    on_gpu = Settings(trainer=TrainerConfig(device="cuda"))
    with pytest.raises(CannotServeError, match="none of /dev/no-such-gpu exists"):
        check_device(on_gpu)

    monkeypatch.setattr(preflight, "_GPU_FILES", ("/dev/null",))
    check_device(on_gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(CannotServeError, match="CUDA_VISIBLE_DEVICES is '-1'"):
        check_device(on_gpu)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ("_OF_HEADS", "session heads: not installed: no_such_module; install them with"),
        ("_OF_MEGATRON", "or set TINKERCLOUD_TRAINER__BACKEND=torch"),
    ],
)
def test_packages_that_heads_need_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, needs: str, message: str
) -> None:
    settings = Settings(trainer=TrainerConfig(backend="megatron", ranks=1))
    check_installed(settings)
    monkeypatch.setattr(preflight, needs, ("json", "no_such_module"))

    with pytest.raises(CannotServeError, match="`pip install") as raised:
        check_installed(settings)

    assert message in str(raised.value)


def test_a_folder_is_a_place_for_checkpoints(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, checkpoint_root=str(tmp_path / "a b"))

    check(settings, {})

    assert settings.checkpoint_url == (tmp_path / "a b").as_uri()
    assert (tmp_path / "a b").is_dir()


@pytest.mark.parametrize("root", ["file://relative/x", "s3://"])
def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path, root: str) -> None:
    with pytest.raises(CannotServeError, match="checkpoint_root: cannot open"):
        check(Settings(state_dir=tmp_path, checkpoint_root=root), {})


def test_a_port_for_metrics_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotServeError, match=f"metrics_port: cannot listen on .*:{port}"):
            check_metrics_port(Settings(state_dir=tmp_path, metrics_port=port))


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "falcon_h1"])
def test_a_family_of_transformers_is_served(folder: Path, family: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))

    check_family("m", folder)


@pytest.mark.parametrize("config", [{"model_type": "no-such-family"}, {}])
def test_a_family_that_transformers_does_not_have_is_named(
    folder: Path, config: dict[str, str]
) -> None:
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(
        CannotServeError, match=r"model 'm': .*has model_type .* no model; serve one"
    ):
        check_family("m", folder)


def test_models_that_do_not_fit_into_memory_are_refused_with_both_sizes(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    needed = 1 << 50

    with pytest.raises(
        CannotServeError, match=r"weights have 1024\.0 TiB, and this machine has .*iB"
    ):
        check_memory(settings, needed)

    check_memory(settings, 1)
    check_memory(settings.model_copy(update={"trainer": TrainerConfig(device="cuda")}), needed)


def test_the_weights_that_a_running_head_has_in_memory_need_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, folder = Settings(state_dir=tmp_path / "state"), tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / SINGLE).write_bytes(a_file(100))
    monkeypatch.setattr(preflight, "available_bytes", lambda: 10)

    with pytest.raises(CannotServeError, match="weights have"):
        check_models(settings, {"m": str(folder)})
    with HeadFolder(folder_of(settings.state_dir, "m")).locked():
        check_models(settings, {"m": str(folder)})
        with pytest.raises(CannotServeError, match="weights have"):
            check_models(settings, {"other": str(folder)})
    with pytest.raises(CannotServeError, match="weights have"):
        check_models(settings, {"m": str(folder)})
