"""Base models are added to a running server and removed from it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_qwen3
from tinkercloud_testing.storage.model_hub import ModelHub, a_model_hub

GIVEN, ADDED, ON_HUB = "tiny/llama", "tiny/qwen", "acme/tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model to add."""
    return save(tiny_qwen3(), tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[ModelHub]:
    """Run a hub that has the same model."""
    with a_model_hub(folder) as running:
        yield running


@pytest.fixture(scope="module")
def server(
    model_folder: Path, hub: ModelHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Run a server that the settings give one model, with another name; it loads none by itself."""
    own = {
        **hub.environment,
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "TINKERCLOUD_ALIASES": json.dumps({"other/name": GIVEN}),
        "TINKERCLOUD_PRELOAD": "false",
    }
    with a_server(tmp_path_factory.mktemp("state"), {GIVEN: model_folder}, own) as running:
        yield running


@pytest.fixture(autouse=True)
def only_the_given_model(server: Server) -> Iterator[None]:
    """Remove what a test has added."""
    yield
    if ADDED in models(server):
        assert models_command(server, "remove", ADDED, "--yes").returncode == 0


@pytest.fixture
def empty(hub: ModelHub, tmp_path: Path) -> Iterator[Server]:
    """Run a server without models."""
    own = {**hub.environment, "HF_HOME": str(tmp_path / "hf")}
    with a_server(tmp_path / "state", {}, own) as running:
        yield running


def models_command(
    server: Server, *arguments: str, key: str = API_KEY, answer: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `tinkercloud models` as a user of the server."""
    return subprocess.run(
        [sys.executable, "-m", "tinkercloud_api", "models", *arguments],
        env={**server.environment(), "TINKER_BASE_URL": server.url, "TINKER_API_KEY": key},
        input=answer,
        capture_output=True,
        text=True,
        check=False,
    )


def models(server: Server, key: str = API_KEY) -> dict[str, dict[str, Any]]:
    """Return what the API lists, by name."""
    listed = server.request("GET", "/api/v1/base_models", key=key).json()["base_models"]
    return {each["model_name"]: each for each in listed}


def test_an_added_model_is_trained_at_once_and_after_a_restart_until_it_is_removed(
    empty: Server, folder: Path
) -> None:
    added = models_command(empty, "add", ADDED, "--path", str(folder))
    assert (added.returncode, added.stdout) == (0, f"{ADDED}: ready\n"), added.stderr
    with empty.client() as client:
        training = client.create_lora_training_client(ADDED, rank=2).result()
        step(training)
        used = models(empty)[ADDED]
        refused = models_command(empty, "remove", ADDED, "--yes")
        unasked = models_command(empty, "remove", ADDED)

    empty.stop()
    empty.start()
    with empty.client() as client:
        step(client.create_lora_training_client(ADDED, rank=2).result())
    (pid,) = empty.head_pids()
    removed = models_command(empty, "remove", ADDED, "--yes")
    again = models_command(empty, "remove", ADDED)

    assert (used["source"], used["runs"]) == (str(folder), 1)
    assert refused.returncode == 1
    assert f"name: runs use {ADDED!r}: {training.model_id} of " in refused.stderr
    assert "end each with `tinkercloud runs stop RUN`" in refused.stderr
    assert unasked.returncode == 1
    assert f"error: runs use {ADDED} (1); end each with" in unasked.stderr
    assert (removed.returncode, removed.stdout) == (0, f"{ADDED} is not served any more\n")
    assert (again.returncode, again.stdout) == (0, f"{ADDED} was not served\n")
    assert not Path(f"/proc/{pid}").exists()
    created = empty.post("create_model", {"base_model": ADDED, "lora_config": {"rank": 2}})
    assert created.status == 400
    assert f"base_model {ADDED!r} is not served here" in created.detail
    empty.stop()
    empty.start()
    assert models(empty) == {}


def test_adding_a_model_again_changes_nothing_and_another_one_cannot_take_its_name(
    server: Server, folder: Path, model_folder: Path
) -> None:
    for _ in range(2):
        assert models_command(server, "add", ADDED, "--path", str(folder)).returncode == 0
    listed = models(server)

    other = models_command(server, "add", ADDED, "--path", str(model_folder))
    alias = models_command(server, "add", "other/name", "--path", str(folder))

    assert f"{ADDED!r} is already served from {str(folder)!r}" in other.stderr
    assert f"'other/name' is an alias of {GIVEN!r}" in alias.stderr
    assert models(server) == listed
    assert [*listed] == [GIVEN, ADDED]


def without(name: str) -> Callable[[Path], object]:
    return lambda copy: (copy / name).unlink()


def of_unknown_family(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "no-such-family"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is neither a local folder nor a valid Hugging Face model id"),
        (without("config.json"), "has no config.json"),
        (without("model.safetensors"), "has no weights"),
        (lambda copy: os.truncate(copy / "model.safetensors", 99), "is truncated or damaged"),
        (of_unknown_family, "has model_type 'no-such-family'"),
    ],
)
def test_a_model_that_serve_would_refuse_cannot_be_added(
    server: Server, folder: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    damage(copy)

    refused = server.post("base_models", {"name": ADDED, "source": str(copy)})

    assert refused.status == 400
    assert refused.detail.startswith(f"source: model {ADDED!r}: ")
    assert message in refused.detail
    assert [*models(server)] == [GIVEN]


@pytest.mark.parametrize("source", ["~nosuch/x", "a" * 300], ids=["user", "length"])
def test_a_source_that_can_be_no_folder_is_refused_by_the_api_and_the_command(
    server: Server, source: str
) -> None:
    refused = server.post("base_models", {"name": ADDED, "source": source})
    command = models_command(server, "add", ADDED, "--path", source)

    assert refused.status == 400
    assert refused.detail.startswith("source: ")
    assert repr(source) in refused.detail
    assert command.returncode == 1
    assert refused.detail in command.stderr


@pytest.mark.long
def test_a_model_is_downloaded_for_a_running_server(empty: Server, hub: ModelHub) -> None:
    hub.may_send.clear()
    accepted = empty.post("base_models", {"name": ON_HUB}).json()
    wait_until(lambda: "config.json" in hub.served, "the first file")
    shown = models(empty)[ON_HUB]
    removed = models_command(empty, "remove", ON_HUB, "--yes")
    gone = [*models(empty)]
    empty.post("base_models", {"name": ON_HUB})
    hub.may_send.set()
    added = models_command(empty, "add", ON_HUB)

    assert accepted["state"].startswith("downloading for ")
    assert (shown["state"].partition(" for ")[0], shown["source"]) == ("downloading", ON_HUB)
    assert (removed.returncode, gone) == (0, [])
    assert (added.returncode, added.stdout) == (0, f"{ON_HUB}: ready\n"), added.stderr
    assert "so far" in added.stderr or "loading" in added.stderr


@pytest.mark.long
def test_a_model_that_cannot_be_downloaded_says_why_and_does_not_return_at_the_next_start(
    server: Server,
) -> None:
    failed = models_command(server, "add", ADDED, "--path", "acme/absent")

    assert failed.returncode == 1
    assert "'acme/absent' is neither a local folder nor complete" in failed.stderr
    assert models(server)[ADDED]["state"].startswith("failed: model ")
    server.stop()
    server.start()
    assert [*models(server)] == [GIVEN]


@pytest.mark.long
def test_a_server_starts_without_an_added_model_that_was_damaged_and_says_why(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert models_command(server, "add", ADDED, "--path", str(copy)).returncode == 0
    server.stop()
    (copy / "model.safetensors").unlink()

    server.start()

    assert "has no weights" in models(server)[ADDED]["state"]
    shutil.copy(folder / "model.safetensors", copy)
    assert models_command(server, "add", ADDED, "--path", str(copy)).returncode == 0


@pytest.mark.long
def test_a_given_model_is_removed_until_the_next_start(server: Server) -> None:
    unsure = models_command(server, "remove", GIVEN, answer="n\n")
    no_terminal = models_command(server, "remove", GIVEN, answer="")
    kept = [*models(server)]
    removed = models_command(server, "remove", GIVEN, answer="y\n")
    gone = [*models(server)]
    server.stop()
    server.start()

    assert (unsure.returncode, no_terminal.returncode, kept) == (1, 1, [GIVEN])
    assert "there is no terminal to ask in; use --yes" in no_terminal.stderr
    assert "until the next start: a setting or --model names it" in removed.stdout
    assert gone == []
    assert [*models(server)] == [GIVEN]


def test_only_admins_add_and_remove_models_or_see_where_they_are(
    server: Server, folder: Path
) -> None:
    user = server.new_key("ada")
    wanted = {"name": ADDED, "source": str(folder)}
    refusals = [
        server.post("base_models", wanted, key=user),
        server.request("DELETE", f"/api/v1/base_models/{GIVEN}", key=user),
    ]
    server.post("base_models", wanted)
    seen = models(server, user)
    listed = models_command(server, "list", key=user).stdout

    assert [each.status for each in refusals] == [403, 403]
    assert "key 'ada' has the role user, and only admins may send POST" in refusals[0].detail
    assert [each["source"] for each in seen.values()] == [None, None]
    assert f"{GIVEN}, other/name" in listed
    events = server.request("GET", "/api/v1/audit?limit=50").json()
    assert "base_model_add" in json.dumps(events)
