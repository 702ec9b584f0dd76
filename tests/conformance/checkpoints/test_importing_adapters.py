"""Adapters of Hugging Face PEFT become checkpoints that can be trained, sampled and exported."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file, save_file
from tinker import types
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel
from typer.testing import CliRunner, Result

from tinkercloud_api.cli import app
from tinkercloud_testing.clients.sdk_steps import score, step
from tinkercloud_testing.serving.servers import API_KEY, Answer, Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama, tiny_qwen3_moe
from tinkercloud_testing.training.peft_adapters import WEIGHTS, logprobs, logprobs_of, write_adapter

BASES: dict[str, Callable[[], PreTrainedModel]] = {
    "tiny/llama": tiny_llama,
    "tiny/tied": partial(tiny_llama, tied=True),
    "tiny/moe": tiny_qwen3_moe,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "tiny/llama": {"target_modules": "all-linear", "lora_alpha": 11},
    "tiny/tied": {"target_modules": ["q_proj", "lm_head"]},
    "tiny/moe": {"target_modules": ATTENTION},
}
TOKENS = [5, 6, 7, 8, 9, 3, 2]
UPLOADS = "/api/v1/checkpoints/uploads"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with an untied, a tied and a mixture model."""
    folders = tmp_path_factory.mktemp("models")
    models = {name: save(make(), folders / name.replace("/", "-")) for name, make in BASES.items()}
    settings = {"TINKERCLOUD_MAX_IMPORT_BYTES": str(1 << 20)}
    with a_server(tmp_path_factory.mktemp("state"), models, settings) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an adapter of the untied model."""
    return write_adapter(
        tiny_llama(), tmp_path_factory.mktemp("adapter"), target_modules=["q_proj"]
    )


@pytest.fixture(scope="module")
def user(server: Server) -> str:
    """Return the key of an owner, "user", who is no admin."""
    return server.new_key("user")


def checkpoints(server: Server, *arguments: object, key: str = API_KEY) -> Result:
    """Run `tinkercloud checkpoints` as a user who knows only the server's URL and a key."""
    environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": key, "COLUMNS": "1000"}
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)], env=environment)


def export(server: Server, path: str, target: Path) -> str:
    """Export a checkpoint to a folder and return the folder."""
    exported = checkpoints(server, "export", path, target)
    assert exported.exit_code == 0, exported.stderr
    return str(target)


def loaded(folder: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    return model


def sampled(client: tinker.ServiceClient, path: str) -> list[float | None]:
    sampler = client.create_sampling_client(model_path=path).result()
    return sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("base", BASES)
def test_an_imported_adapter_computes_what_peft_computes_is_trained_and_exported(
    server: Server, tmp_path: Path, base: str
) -> None:
    folder = write_adapter(BASES[base](), tmp_path / "adapter", **ADAPTERS[base])
    expected = logprobs(BASES[base](), folder, TOKENS)

    path = checkpoints(server, "import", folder, "--base-model", base, "--name", "mine").stdout
    with server.client() as client:
        training = client.create_training_client_from_state(path.strip()).result()
        trained, drawn = score(training, TOKENS), sampled(client, path.strip())
        saved = training.save_weights_for_sampler("same").result().path
        losses = [step(training) for _ in range(3)]
    exports = [tmp_path / "imported", tmp_path / "saved"]
    for each, target in zip([path.strip(), saved], exports, strict=True):
        export(server, each, target)

    np.testing.assert_allclose(np.asarray(trained), np.asarray(expected), atol=1e-5)
    np.testing.assert_allclose(np.asarray(drawn, float), np.asarray(expected), atol=1e-5)
    assert losses[-1] < losses[0]
    for target in exports:
        again = logprobs(BASES[base](), target, TOKENS)
        np.testing.assert_allclose(np.asarray(again), np.asarray(expected), atol=1e-5)


def test_an_exported_adapter_with_experts_can_be_imported(server: Server, tmp_path: Path) -> None:
    with server.client() as client:
        training = client.create_lora_training_client("tiny/moe", rank=4).result()
        step(training)
        step(training)
        expected = score(training, TOKENS)
        saved = training.save_weights_for_sampler("experts").result().path
        checkpoints(server, "export", saved, tmp_path / "adapter")

        imported = checkpoints(server, "import", tmp_path / "adapter", "--base-model", "tiny/moe")

        copy = client.create_training_client_from_state(imported.stdout.strip()).result()
        np.testing.assert_allclose(score(copy, TOKENS), expected, atol=1e-5)


# It warns that servers have little experience with adapters of experts, and PEFT of its own
# patterns of experts that they fit no module.
@pytest.mark.filterwarnings("ignore::UserWarning:tinker_cookbook.*")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("base", BASES)
def test_the_cookbook_merges_and_converts_what_was_trained_through_the_sdk(
    server: Server, tmp_path: Path, base: str
) -> None:
    with server.client() as client:
        training = client.create_lora_training_client(base, rank=4, train_unembed=False).result()
        step(training)
        step(training)
        expected = np.asarray(score(training, TOKENS))
        saved = training.save_weights_for_sampler("final").result().path
    base_model, adapter = str(server.models[base]), export(server, saved, tmp_path / "adapter")
    merged, converted = str(tmp_path / "merged"), str(tmp_path / "converted")

    build_hf_model(base_model=base_model, adapter_path=adapter, output_path=merged, dtype="float32")
    build_lora_adapter(base_model=base_model, adapter_path=adapter, output_path=converted)

    of_merged = logprobs_of(loaded(merged), TOKENS)
    np.testing.assert_allclose(np.asarray(of_merged), expected, atol=1e-5)
    of_converted = logprobs(BASES[base](), Path(converted), TOKENS)
    np.testing.assert_allclose(np.asarray(of_converted), expected, atol=1e-5)


def test_the_cookbook_merges_an_imported_adapter(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    imported = checkpoints(server, "import", folder, "--base-model", "tiny/llama")
    adapter = export(server, imported.stdout.strip(), tmp_path / "adapter")

    build_hf_model(
        base_model=str(server.models["tiny/llama"]),
        adapter_path=adapter,
        output_path=str(tmp_path / "merged"),
        dtype="float32",
    )

    merged = logprobs_of(loaded(str(tmp_path / "merged")), TOKENS)
    expected = logprobs(tiny_llama(), folder, TOKENS)
    np.testing.assert_allclose(np.asarray(merged), np.asarray(expected), atol=1e-5)


def test_checkpoints_are_listed_with_their_base_model_and_deleted(
    server: Server, folder: Path, user: str
) -> None:
    key = user
    arguments = ["import", folder, "--base-model", "tiny/llama", "--ttl-seconds", "3600"]
    path = checkpoints(server, *arguments, key=key).stdout.strip()

    listed = json.loads(checkpoints(server, "list", "--json", key=key).stdout)
    page = checkpoints(server, "list", key=key).stdout
    asked = checkpoints(server, "delete", path, key=key)
    assert (asked.exit_code, path in checkpoints(server, "list", key=key).stdout) == (1, True)
    assert f"Delete {path}?" in asked.stderr
    deleted = checkpoints(server, "delete", path, "--yes", key=key)

    row = next(row for row in listed if row["tinker_path"] == path)
    assert row["base_model"] == "tiny/llama"
    assert row["expires_at"] is not None
    assert path in page
    assert (deleted.exit_code, deleted.stdout) == (0, f"deleted {path}\n")
    assert path not in checkpoints(server, "list", "--json", key=key).stdout
    assert "404" in checkpoints(server, "delete", path, "--yes", "--json", key=key).stderr


def test_an_admin_imports_for_another_owner_and_nobody_else_does(
    server: Server, folder: Path, user: str
) -> None:
    arguments = ["import", folder, "--base-model", "tiny/llama", "--owner"]

    path = checkpoints(server, *arguments, "user").stdout.strip()
    refused = checkpoints(server, *arguments, "someone", key=user)

    assert path in checkpoints(server, "list", "--json", key=user).stdout
    assert "only an admin may import for another owner" in refused.stderr


def test_the_audit_log_names_the_upload_and_the_checkpoint_of_an_import(
    server: Server, folder: Path
) -> None:
    path = checkpoints(server, "import", folder, "--base-model", "tiny/llama").stdout.strip()

    entries = server.request("GET", "/api/v1/audit").json()["entries"]

    imports = [each["event_details"] for each in entries if each["event"] == "checkpoint_import"]
    started, received, finished = imports[-3:]
    assert len(started["objects"]) == 1
    assert received["objects"] == started["objects"]
    assert set(finished["objects"]) == {path, *started["objects"]}


def test_the_run_of_an_imported_adapter_has_no_model(server: Server, folder: Path) -> None:
    imported = checkpoints(server, "import", folder, "--base-model", "tiny/llama")
    run_id = imported.stdout.strip().split("/")[2]

    run = server.rest().get_training_run(run_id).result()
    answer = server.post("optim_step", {"model_id": run_id, "seq_id": 1, "adam_params": {}})

    assert (run.base_model, run.lora_rank) == ("tiny/llama", 4)
    assert answer.status == 410
    assert "create_training_client_from_state" in answer.detail


def test_an_import_has_no_optimizer_state(server: Server, folder: Path) -> None:
    path = checkpoints(server, "import", folder, "--base-model", "tiny/llama").stdout.strip()

    with (
        server.client() as client,
        pytest.raises(tinker.RequestFailedError, match="contains no optimizer state"),
    ):
        client.create_training_client_from_state_with_optimizer(path).result()


def test_an_adapter_that_does_not_fit_is_refused_and_not_listed(
    server: Server, tmp_path: Path
) -> None:
    key = server.new_key("misfit")
    larger = write_adapter(
        tiny_llama(hidden_size=64), tmp_path / "larger", target_modules=["q_proj"]
    )
    broken = write_adapter(tiny_llama(), tmp_path / "broken", target_modules=["q_proj"])
    tensors = load_file(broken / WEIGHTS)
    tensors[next(iter(tensors))][0, 0] = float("nan")
    save_file(tensors, broken / WEIGHTS)

    for folder, message in ((larger, "of shape [64, 64]"), (broken, "NaN or infinite")):
        refused = checkpoints(server, "import", folder, "--base-model", "tiny/llama", key=key)

        assert message in refused.stderr
    assert json.loads(checkpoints(server, "list", "--json", key=key).stdout) == []


def a_start(folder: Path, **changes: object) -> dict[str, object]:
    config = json.loads((folder / "adapter_config.json").read_text())
    size = (folder / WEIGHTS).stat().st_size
    fields = {"base_model": "tiny/llama", "adapter_config": config, "size_bytes": size}
    return {**fields, **changes}


def put(server: Server, upload: str, content: bytes, *, key: str = API_KEY) -> Answer:
    return server.request("PUT", f"{UPLOADS}/{upload}/{WEIGHTS}", content, key=key)


def test_wrong_uploads_are_rejected_before_they_start(server: Server, folder: Path) -> None:
    dora = {**json.loads((folder / "adapter_config.json").read_text()), "use_dora": True}
    wrong: list[tuple[dict[str, object], str]] = [
        ({"base_model": "unknown"}, "base_model"),
        ({"adapter_config": dora}, "adapter_config.json: use_dora"),
        ({"adapter_config": []}, "adapter_config"),
        ({"adapter_config": {**dora, "use_dora": "x" * (1 << 17)}}, "at most 65536 bytes"),
        ({"size_bytes": 0}, "size_bytes"),
        ({"size_bytes": 2 << 20}, "max_import_bytes"),
        ({"name": "a/b"}, "checkpoint name 'a/b'"),
        ({"ttl_seconds": 1}, "ttl_seconds"),
    ]

    for changes, message in wrong:
        answer = server.post("checkpoints/uploads", a_start(folder, **changes))

        assert (answer.status, message in answer.detail) == (400, True), answer.body


def test_a_wrong_file_is_rejected_and_nothing_of_it_is_visible(
    server: Server, folder: Path
) -> None:
    key = server.new_key("clumsy")
    content = (folder / WEIGHTS).read_bytes()
    wrong = {
        b"PK\3\4" * 4: "not a safetensors file",
        content + b"x": "larger than",
        content.replace(b"lora_A", b"lora_C"): "not a LoRA matrix",
    }

    # More of them than uploads that the owner may have.
    for body, message in [*wrong.items()] * 2:
        refused = server.post("checkpoints/uploads", a_start(folder), key=key).json()["upload_id"]
        answer = put(server, refused, body, key=key)
        assert (answer.status, message in answer.detail) == (400, True), answer.body
        assert "this upload has ended" in answer.detail
        assert put(server, refused, content, key=key).status == 404
    assert json.loads(checkpoints(server, "uploads", "--json", key=key).stdout) == []
    started = server.post("checkpoints/uploads", a_start(folder), key=key).json()
    upload = started["upload_id"]
    cut = put(server, upload, content[:-1], key=key)
    assert (cut.status, "send the file again" in cut.detail) == (400, True)
    early = server.post(f"checkpoints/uploads/{upload}/finish", {}, key=key)

    assert "adapter_model.safetensors is missing" in early.detail
    assert json.loads(checkpoints(server, "list", "--json", key=key).stdout) == []
    assert server.rest(key).list_training_runs().result().training_runs == []
    assert not list(server.state_dir.rglob(f"*{upload}*/**/*.safetensors"))
    assert put(server, upload, content, key=key).status == 200
    paths = {
        server.post(f"checkpoints/uploads/{upload}/finish", {}, key=key).json()["tinker_path"]
        for _ in range(2)
    }
    assert len(paths) == 1
    assert put(server, upload, content, key=key).status == 400
    assert server.request("DELETE", f"{UPLOADS}/{upload}", key=key).status == 400


def test_uploads_of_one_owner_are_few_and_hidden_from_others(
    server: Server, folder: Path, user: str
) -> None:
    flood, other = server.new_key("flood"), user

    answers = [server.post("checkpoints/uploads", a_start(folder), key=flood) for _ in range(5)]
    uploads = [answer.json()["upload_id"] for answer in answers[:4]]

    assert [answer.status for answer in answers] == [200] * 4 + [429]
    assert server.post("checkpoints/uploads", a_start(folder), key=other).status == 200
    content = (folder / WEIGHTS).read_bytes()
    assert put(server, uploads[0], content, key=other).status == 404
    assert put(server, uploads[0], content, key="tml-unknown").status == 401
    finish = f"checkpoints/uploads/{uploads[0]}/finish"
    assert server.post(finish, {}, key=other).status == 404
    assert server.request("DELETE", f"{UPLOADS}/{uploads[0]}", key=other).status == 404
    assert server.request("DELETE", f"{UPLOADS}/{uploads[0]}", key=flood).status == 200
    assert server.post("checkpoints/uploads", a_start(folder), key=flood).status == 200
    left = checkpoints(server, "uploads", "--delete", uploads[1], "--yes", "--json", key=flood)
    listed = [each["upload_id"] for each in json.loads(left.stdout)]
    assert (len(listed), set(uploads[2:]) - set(listed)) == (3, set())
    assert json.loads(checkpoints(server, "uploads", "--json", key=other).stdout)[0]["name"]
    unknown = server.request("PUT", f"{UPLOADS}/{uploads[2]}/x.bin", b"x", key=flood)
    assert (unknown.status, WEIGHTS in unknown.detail) == (404, True)


def test_the_command_names_what_is_missing(server: Server, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    missing = checkpoints(server, "import", tmp_path, "--base-model", "tiny/llama")
    unserved = checkpoints(server, "import", folder, "--base-model", "unknown")
    malformed = checkpoints(server, "export", "tinker://x", tmp_path / "x")
    unknown = checkpoints(server, "export", "tinker://s:train:0/weights/a", tmp_path / "x")
    in_use = checkpoints(server, "export", "tinker://s:train:0/weights/a", tmp_path / "full")

    results = [missing, unserved, malformed, unknown, in_use]
    assert [result.exit_code for result in results] == [1] * 5
    assert "adapter_config.json does not exist" in missing.stderr
    assert "400: base_model" in unserved.stderr
    assert "'tinker://x' is not a checkpoint" in malformed.stderr
    assert unknown.stderr.startswith("error: 404")
    assert "not an empty folder" in in_use.stderr


def start_external(server: Server, version: str, **fields: object) -> Answer:
    """Send the request that starts an upload, as the SDK of a version documents it."""
    body = {"base_model": "tiny/llama", "lora_config": {"rank": 4}, **fields}
    headers = {"x-sdk-version": version}
    return server.request("POST", "/api/v1/external_weights_upload_start", body, headers=headers)


def put_signed(server: Server, url: str, content: bytes) -> Answer:
    assert url.startswith(server.url)
    return server.request("PUT", url.removeprefix(server.url), content, key=None)


def test_an_upload_of_a_rank_that_no_adapter_may_have_is_refused_at_its_start(
    server: Server,
) -> None:
    refused = start_external(server, "0.39.0", lora_config={"rank": 5000})

    assert refused.status == 400
    assert "lora_config.rank: must be at most 1024, got 5000" in refused.detail


def test_an_adapter_is_uploaded_by_signed_urls_without_a_key(server: Server, folder: Path) -> None:
    started = start_external(server, "0.39.0").json()

    for name, url in started["urls"].items():
        assert put_signed(server, url, (folder / name).read_bytes()).status == 200
    finish = {"upload_id": started["upload_id"]}
    first, again = (server.post("external_weights_upload_finish", finish) for _ in range(2))

    assert first.json() == again.json()
    with server.client() as client:
        path = first.json()["tinker_path"]
        training = client.create_training_client_from_state(path).result()
        expected = logprobs(tiny_llama(), folder, TOKENS)
        np.testing.assert_allclose(score(training, TOKENS), np.asarray(expected), atol=1e-5)


def test_later_sdks_get_each_url_with_the_headers_to_send(server: Server) -> None:
    project = server.new_project("imports")
    started = start_external(server, "0.40.1", destination_project_id=project).json()

    assert {name: target["headers"] for name, target in started["urls"].items()} == {
        "adapter_config.json": {},
        WEIGHTS: {},
    }
    assert put_signed(server, started["urls"][WEIGHTS]["url"], b"x" * 16).status == 400


def test_changed_urls_and_wrong_files_are_rejected(server: Server, folder: Path) -> None:
    started = start_external(server, "0.39.0").json()
    config, weights = started["urls"]["adapter_config.json"], started["urls"][WEIGHTS]
    finish = {"upload_id": started["upload_id"]}
    other = json.loads((folder / "adapter_config.json").read_text()) | {"r": 8}
    changed = [
        weights.replace("owner=bootstrap", "owner=reader"),
        weights.replace("expires=", "expires=9"),
        weights.replace(WEIGHTS, "adapter_config.json"),
        weights.partition("?")[0],
    ]

    assert [put_signed(server, url, b"x").status for url in changed] == [403] * 4
    assert "adapter_config.json: is not JSON" in put_signed(server, config, b"{").detail
    assert "r: expected 4" in put_signed(server, config, json.dumps(other).encode()).detail
    assert put_signed(server, config, b" " * (1 << 17)).status == 413
    assert "max_import_bytes" in put_signed(server, weights, b"x" * (1 << 21)).detail
    missing = server.post("external_weights_upload_finish", finish)
    assert (missing.status, "adapter_config.json is missing" in missing.detail) == (400, True)
    unknown = server.post("external_weights_upload_finish", {"upload_id": "unknown"})
    assert unknown.status == 404
    assert start_external(server, "x", lora_config={"rank": 0}).status == 400
    assert start_external(server, "x", base_model="unknown").status == 400
    server.request("DELETE", f"{UPLOADS}/{started['upload_id']}")
