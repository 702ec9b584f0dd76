"""Models are downloaded atomically from the hub or an object store."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import PreconditionError
from obstore.store import ObjectStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_testing.small_models import wrong_folders
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.storage.buckets import Bucket, a_bucket
from tinkercloud_testing.storage.model_hub import ModelHub, a_model_hub
from tinkercloud_worker import fetch_model

pytestmark = pytest.mark.timeout(120)

SOURCE = "hub:acme/tiny"
CLUTTER = ("pytorch_model.bin", "modeling_acme.py", "consolidated.safetensors", "onnx/model.json")


def a_sharded_model(folder: Path) -> Path:
    """Write a tiny model with several weight files, and with unwanted files."""
    save(tiny_llama(), folder)
    (folder / "model.safetensors").unlink()
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    for name in CLUTTER:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 100)
    return folder


def fetched(
    source: str, folder: Path, *part: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command as a pod's init container does."""
    return subprocess.run(
        [sys.executable, "-m", "tinkercloud_worker.fetch_model", source, str(folder), *part],
        env={**os.environ, "HF_HOME": str(folder.parent / "hf"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ModelHub]:
    with a_model_hub(a_sharded_model(tmp_path / "on-hub")) as hub:
        yield hub


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with a_bucket("127.0.0.1") as made:
        yield made


@pytest.mark.long
def test_a_hub_model_is_downloaded_without_files_that_are_never_loaded(
    hub: ModelHub, tmp_path: Path
) -> None:
    folder = tmp_path / "scratch" / "model"

    result = fetched(SOURCE, folder, **hub.environment)

    assert result.returncode == 0, result.stderr
    assert [path.name for path in shards(folder)] == [
        path.name for path in shards(hub.folder) if path.name not in CLUTTER
    ]
    assert not {path.name for path in folder.iterdir()} & {*CLUTTER, "onnx", ".cache"}
    AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize(
    ("suffix", "asked"),
    [pytest.param("", "main", marks=pytest.mark.long), ("@0a1b2c", "0a1b2c")],
)
def test_a_hub_model_is_downloaded_at_its_revision(
    hub: ModelHub, tmp_path: Path, suffix: str, asked: str
) -> None:
    result = fetched(f"{SOURCE}{suffix}", tmp_path / "model", **hub.environment)

    assert result.returncode == 0, result.stderr
    assert hub.revisions[0] == asked


@pytest.mark.long
def test_an_existing_model_is_not_downloaded_again(hub: ModelHub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fetched(SOURCE, folder, **hub.environment)
    hub.served.clear()

    result = fetched(SOURCE, folder, **hub.environment)

    assert result.returncode == 0, result.stderr
    assert hub.served == []


def test_a_gated_hub_model_is_rejected_by_name(hub: ModelHub, tmp_path: Path) -> None:
    folder = tmp_path / "model"

    result = fetched(SOURCE, folder, **{**hub.environment, "HF_TOKEN": "hf_guessed"})

    assert result.returncode == 1
    assert "failed to download hub:acme/tiny: GatedRepoError" in result.stderr
    assert "hf_guessed" not in result.stderr
    assert not folder.exists()


@pytest.mark.long
def test_a_stored_model_is_downloaded_without_files_that_are_never_loaded(
    bucket: Bucket, tmp_path: Path
) -> None:
    kept, folder = a_sharded_model(tmp_path / "kept"), tmp_path / "scratch" / "model"
    source = bucket.hold(kept, "acme/tiny")

    result = fetched(source, folder, **bucket.environment)

    assert result.returncode == 0, result.stderr
    assert [path.read_bytes() for path in shards(folder)] == [
        path.read_bytes() for path in shards(kept) if path.name not in CLUTTER
    ]
    assert not {path.name for path in folder.iterdir()} & {*CLUTTER, "onnx"}
    AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def test_a_large_file_is_downloaded_in_chunks_of_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, content = tmp_path / "kept", bytes(range(256)) * 10
    kept.mkdir()
    for name in ("large.json", "replaced.json"):
        (kept / name).write_bytes(content)
    (kept / "empty.json").touch()
    store = open_store(kept.as_uri())
    found = {file["path"]: file for batch in obstore.list(store) for file in batch}
    (kept / "replaced.json").write_bytes(content[::-1])
    asked: list[tuple[int, int]] = []
    get = obstore.get

    def noted(store: ObjectStore, path: str, *, options: Any) -> object:
        asked.append(options["range"])
        return get(store, path, options=options)

    monkeypatch.setattr(obstore, "get", noted)
    monkeypatch.setattr(fetch_model, "_CHUNK_BYTES", 1000)
    copy = fetch_model._copy
    copy(store, found["large.json"], tmp_path)
    copy(store, found["empty.json"], tmp_path)

    assert (tmp_path / "large.json").read_bytes() == content
    assert (tmp_path / "empty.json").read_bytes() == b""
    assert asked == [(0, 1000), (1000, 2000), (2000, 2560)]
    with pytest.raises(PreconditionError):
        copy(store, found["replaced.json"], tmp_path)
    assert not (tmp_path / "replaced.json").exists()


def test_a_description_is_downloaded_without_weights(
    hub: ModelHub, bucket: Bucket, tmp_path: Path
) -> None:
    kept = a_sharded_model(tmp_path / "kept")
    stored = bucket.hold(kept, "acme/described")
    folders = [tmp_path / "from-hub", tmp_path / "from-store"]

    results = [
        fetched(SOURCE, folders[0], "description", **hub.environment),
        fetched(stored, folders[1], "description", **bucket.environment),
    ]

    assert [result.returncode for result in results] == [0, 0], results
    assert [shards(folder) for folder in folders] == [[], []]
    assert not [name for name in hub.served if name.endswith(".safetensors")]
    assert all((folder / "config.json").exists() for folder in folders)
    assert all((folder / "tokenizer.json").exists() for folder in folders)


def test_an_interrupted_download_resumes(bucket: Bucket, tmp_path: Path) -> None:
    kept, folder = a_sharded_model(tmp_path / "kept"), tmp_path / "model"
    source = bucket.hold(kept, "cut-off")
    lost = shards(kept)[-1].name
    bucket.forget("cut-off", lost)
    first = fetched(source, folder, **bucket.environment)
    partial = tmp_path / ".model.partial"
    times = {path.name: path.stat().st_mtime_ns for path in shards(partial)}
    bucket.hold(kept, "cut-off")

    second = fetched(source, folder, **bucket.environment)

    assert (first.returncode, second.returncode) == (1, 0), second.stderr
    assert f"lacks {lost}" in first.stderr
    assert times
    assert {name: (folder / name).stat().st_mtime_ns for name in times} == times
    assert not partial.exists()


@pytest.mark.long
def test_wrong_weights_are_rejected_and_downloaded_again_once_corrected(
    bucket: Bucket, tmp_path: Path
) -> None:
    kept, folder = save(tiny_llama(), tmp_path / "kept"), tmp_path / "model"
    sound = (kept / "model.safetensors").read_bytes()
    wrong_folders.value(wrong_folders.UP, float("nan"))(kept)
    source = bucket.hold(kept, "not-a-number")
    refused = fetched(source, folder, **bucket.environment)
    (kept / "model.safetensors").write_bytes(sound)
    bucket.hold(kept, "not-a-number")

    mended = fetched(source, folder, **bucket.environment)

    assert (refused.returncode, mended.returncode) == (1, 0), mended.stderr
    assert f"{source}: the weight files do not match config.json" in refused.stderr
    assert f"NaN or infinite values in {wrong_folders.UP}" in refused.stderr
    assert (folder / "model.safetensors").read_bytes() == sound
    assert not list(folder.glob(".*"))


@pytest.mark.long
def test_wrong_tensor_names_are_rejected(bucket: Bucket, tmp_path: Path) -> None:
    kept = save(tiny_llama(), tmp_path / "kept")
    wrong_folders.prefixed("_orig_mod.")(kept)
    source = bucket.hold(kept, "compiled")

    result = fetched(source, tmp_path / "model", **bucket.environment)

    assert result.returncode == 1
    assert "all names in the files start with '_orig_mod.'" in result.stderr
    assert not (tmp_path / "model").exists()


def test_pickled_weights_are_rejected(bucket: Bucket, tmp_path: Path) -> None:
    kept = save(tiny_llama(), tmp_path / "kept")
    (kept / "model.safetensors").rename(kept / "pytorch_model.bin")
    source = bucket.hold(kept, "pickled")

    result = fetched(source, tmp_path / "model", **bucket.environment)

    assert result.returncode == 1
    assert f"{source} is not a complete model" in result.stderr
    assert "*.safetensors" in result.stderr
    assert not (tmp_path / "model").exists()


def test_a_missing_bucket_is_reported_by_name(bucket: Bucket, tmp_path: Path) -> None:
    result = fetched("s3://nothing/at-all", tmp_path / "model", **bucket.environment)

    assert result.returncode == 1
    assert "failed to download s3://nothing/at-all" in result.stderr


@pytest.mark.parametrize("source", ["acme/tiny", "https://example.org/tiny", "file:///etc"])
def test_an_unsupported_source_is_rejected(source: str, tmp_path: Path) -> None:
    result = fetched(source, tmp_path / "model")

    assert result.returncode == 1
    assert f"unsupported model source {source!r}" in result.stderr


SERVED = """
import sys
from tinkercloud_api.serve.model_download import download_missing
from tinkercloud_api.providers.model_arguments import ModelNotFoundError, resolve
try:
    download_missing({"m": sys.argv[1]})
except ModelNotFoundError as error:
    sys.exit(str(error))
print(resolve("m", sys.argv[1]).local_path)
"""


def served(model: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Do what a local server does with a model before it serves it."""
    return subprocess.run(
        [sys.executable, "-c", SERVED, model],
        env={**os.environ, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_local_server_downloads_a_model_once_and_continues_an_interrupted_download(
    hub: ModelHub, tmp_path: Path
) -> None:
    first = served("acme/tiny", tmp_path, **hub.environment)
    assert first.returncode == 0, first.stderr
    assert f"Downloading acme/tiny from {hub.url}, once" in first.stderr
    folder = Path(first.stdout.strip())
    assert not {path.name for path in folder.iterdir()} & {*CLUTTER, "onnx"}

    hub.served.clear()
    assert served("acme/tiny", tmp_path, **hub.environment).stdout == first.stdout
    assert hub.served == []

    lost = shards(folder)[0]
    lost.resolve().unlink()
    lost.unlink()
    assert served("acme/tiny", tmp_path, **hub.environment).stdout == first.stdout
    assert [name for name in hub.served if name.endswith(".safetensors")] == [lost.name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HF_TOKEN": "hf_guessed"}, "set HF_TOKEN for a gated model"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be downloaded from http://127.0.0.1:9 ("),
        ({"HF_HUB_OFFLINE": "1"}, "unset HF_HUB_OFFLINE"),
    ],
)
def test_a_local_server_says_why_a_model_cannot_be_downloaded_and_what_to_do(
    hub: ModelHub, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    refused = served("acme/tiny", tmp_path, **{**hub.environment, **changes})

    assert refused.returncode == 1
    (sentence,) = refused.stderr.splitlines()[-1:]
    assert sentence.startswith("model 'm': 'acme/tiny' is neither a local folder nor complete in")
    assert message in sentence
    assert "or pass a folder: --model m=/path/to/model" in sentence
