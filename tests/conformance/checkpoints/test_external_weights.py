"""Weights leave: saved as files, encrypted or not, and downloaded by several programs."""

import io
import os
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import peft
import pyrage
import pytest
import tinker
import torch
from tinker import types
from tinker_cookbook import weights
from tinker_cookbook.weights._artifacts import load_adapter_weights
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.clients.raw_run import Run
from tinkercloud_testing.clients.sdk_steps import score, step
from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.storage.hub import a_hub

MODEL = "tiny/llama"
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
TOKENS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def training(server: Server) -> tinker.TrainingClient:
    """Return a run after two steps, with a checkpoint `weights/two`."""
    client = server.client().create_lora_training_client(MODEL, rank=4, seed=1).result()
    for _ in range(2):
        step(client)
    client.save_state("two").result()
    return client


def command(server: Server, *arguments: str, **environment: str) -> str:
    """Run the SDK's command and return its output."""
    result = subprocess.run(
        [sys.executable, "-m", "tinker.cli", *arguments],
        env={
            **os.environ,
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": API_KEY,
            "TINKER_TELEMETRY": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def download(server: Server, path: str, folder: Path) -> set[str]:
    """Download external weights into a new folder; return the names of the files."""
    urls = server.rest().get_external_weights_urls(path).result().urls
    folder.mkdir()
    for name, url in urls.items():
        with urllib.request.urlopen(url) as response:
            (folder / name).write_bytes(response.read())
    return set(urls)


def stored(server: Server, run_id: str) -> set[str]:
    """Return the names of all files of a run's external weights in the store."""
    folder = server.state_dir / "checkpoints" / "runs" / run_id / "external_weights"
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def logprobs(model: PreTrainedModel) -> list[float]:
    """Return the logprobs of all tokens except the first."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS[1:])[:, None])
    return [float(each) for each in chosen[:, 0]]


def test_the_sdks_command_downloads_a_training_checkpoint_and_leaves_nothing_behind(
    server: Server, training: tinker.TrainingClient, tmp_path: Path
) -> None:
    path = f"tinker://{training.model_id}/weights/two"
    before = server.rest().list_user_checkpoints().result().checkpoints

    command(server, "checkpoint", "download", path, "--output", str(tmp_path))

    folder = tmp_path / f"{training.model_id}_weights_two"
    assert {file.name for file in folder.iterdir()} == ADAPTER
    assert server.rest().list_user_checkpoints().result().checkpoints == before


def test_a_downloaded_adapter_that_peft_merged_has_the_trainers_logprobs(
    server: Server, training: tinker.TrainingClient, model_folder: Path, tmp_path: Path
) -> None:
    path = training.save_weights_external("merged").result().path

    command(server, "checkpoint", "download", path, "--output", str(tmp_path))

    (folder,) = tmp_path.iterdir()
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    unchanged = logprobs(base)
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().eval()
    expected = score(training, TOKENS)
    np.testing.assert_allclose(logprobs(merged), expected, atol=1e-5)
    assert np.abs(np.subtract(unchanged, expected)).max() > 0.01


def test_the_cookbook_downloads_a_training_checkpoint_encrypted_on_the_way(
    server: Server,
    training: tinker.TrainingClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    path = training.save_weights_external("plain").result().path
    download(server, path, tmp_path / "plain")

    weights.download(
        tinker_path=f"tinker://{training.model_id}/weights/two",
        output_dir=str(tmp_path / "cookbook"),
        base_url=server.url,
    )

    for name in ADAPTER:
        expected = (tmp_path / "plain" / name).read_bytes()
        assert (tmp_path / "cookbook" / name).read_bytes() == expected
    tensors, config = load_adapter_weights(tmp_path / "cookbook")
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    assert all(name.startswith("base_model.model.") for name in tensors)


def test_encrypted_weights_never_exist_unencrypted_in_the_store(
    server: Server, training: tinker.TrainingClient, tmp_path: Path
) -> None:
    identity = pyrage.x25519.Identity.generate()
    keys = [str(identity.to_public()), str(pyrage.x25519.Identity.generate().to_public())]

    path = training.save_weights_external("secret", age_encryption_recipients=keys).result().path

    names = download(server, path, tmp_path / "x")
    assert names == {f"{name}.age" for name in ADAPTER}
    config = pyrage.decrypt((tmp_path / "x" / "adapter_config.json.age").read_bytes(), [identity])
    assert b'"lora_alpha": 32' in config
    kept = {name for name in stored(server, training.model_id) if name.startswith("secret/")}
    assert kept == {f"secret/{name}.age" for name in ADAPTER} | {"secret/manifest.json"}


def test_the_sdks_command_uploads_an_adapter_to_a_hub(
    server: Server, training: tinker.TrainingClient, tmp_path: Path
) -> None:
    path = f"tinker://{training.model_id}/weights/two"

    with a_hub() as hub:
        command(
            server,
            *("checkpoint", "push-hf", path, "--repo", "me/adapter"),
            HF_ENDPOINT=hub.url,
            HF_TOKEN="hf_any",
            HF_HOME=str(tmp_path),
        )

    uploaded = hub.files["me/adapter"]
    assert set(uploaded) == ADAPTER | {"README.md"}
    assert f"base_model: {MODEL}".encode() in uploaded["README.md"]
    assert uploaded["adapter_model.safetensors"][8:9] == b"{"


def test_external_weights_are_listed_expire_and_are_deleted_like_other_checkpoints(
    server: Server, training: tinker.TrainingClient
) -> None:
    rest = server.rest()
    path = training.save_weights_external("kept", ttl_seconds=3600).result().path

    checkpoints = rest.list_checkpoints(training.model_id).result().checkpoints
    listed = {each.tinker_path: each for each in checkpoints}

    assert listed[path].checkpoint_type == "external"
    assert listed[path].size_bytes
    assert listed[path].expires_at is not None
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    with pytest.raises(tinker.RequestFailedError, match="already exists: choose another name"):
        training.save_weights_external("kept").result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not any(name.startswith("kept/") for name in stored(server, training.model_id))
    assert training.save_weights_external("kept").result().path == path


def test_external_weights_are_not_for_loading(
    server: Server, training: tinker.TrainingClient
) -> None:
    client = server.client()
    path = training.save_weights_external("for-others").result().path

    with pytest.raises(tinker.BadRequestError, match="holds files for download"):
        client.create_training_client_from_state(path).result()
    with pytest.raises(tinker.BadRequestError, match="holds files for download"):
        client.create_sampling_client(path).result()


def test_a_repeated_save_is_the_same_request(server: Server, tmp_path: Path) -> None:
    run = Run(server)
    body = {"model_id": run.model_id, "seq_id": run.take_seq_id(), "path": "once"}

    answers = [server.post("save_weights_external", body) for _ in range(2)]

    assert len({answer.json()["request_id"] for answer in answers}) == 1
    outcome = run.outcome(answers[0])
    assert outcome["path"] == f"tinker://{run.model_id}/external_weights/once"
    names = download(server, str(outcome["path"]), tmp_path / "x")
    assert outcome["size_bytes"] == sum((tmp_path / "x" / name).stat().st_size for name in names)


def test_a_bad_recipient_fails_in_its_place_and_nothing_is_saved(server: Server) -> None:
    run = Run(server)
    secret = str(pyrage.x25519.Identity.generate())

    outcome = run.outcome(
        run.send("save_weights_external", path="x", age_encryption_recipients=[secret])
    )

    assert outcome["category"] == "user"
    assert "age_encryption_recipients.0: is a secret key" in str(outcome["error"])
    assert stored(server, run.model_id) == set()
    assert run.step() > 0


def test_a_full_model_becomes_a_folder_that_transformers_loads(
    server: Server, tmp_path: Path
) -> None:
    session = server.post("create_session", {"sdk_version": "test"}).json()["session_id"]
    request = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    created = server.post("create_model", request).json()
    model_id = str(server.result(str(created["request_id"])).json()["model_id"])
    info = server.post("get_info", {"model_id": model_id}).json()
    training = tinker.TrainingClient(
        server.client().holder,
        model_seq_id=0,
        model_id=model_id,
        info=types.GetInfoResponse.model_validate(info),
    )
    step(training)

    path = training.save_weights_external("folder").result().path

    names = download(server, path, tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    np.testing.assert_allclose(logprobs(model), score(training, TOKENS), atol=1e-5)


def test_an_archive_is_a_tar_file_of_the_adapter(
    server: Server, training: tinker.TrainingClient
) -> None:
    answer = server.request(
        "GET",
        f"/api/v1/training_runs/{training.model_id}/checkpoints/weights/two/archive",
        headers={"Accept": "application/json"},
    )

    with urllib.request.urlopen(answer.json()["url"]) as response:
        content = response.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert set(archive.getnames()) == ADAPTER | {"checkpoint_complete"}
