"""The checkpoints of a run in the console: who may download, publish, keep and delete them."""

import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import tinker
from typer.testing import CliRunner, Result

from tinkercloud_api.cli import app
from tinkercloud_api.config.readable import moment
from tinkercloud_testing.clients.console_browser import Browser, events, read_only_browser, text
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import API_KEY, Server

MODEL = "tiny/llama"
LIFE = "Keep it for so many days"


@pytest.fixture(scope="module")
def training(server: Server) -> tinker.TrainingClient:
    training = server.client().create_lora_training_client(MODEL, rank=4).result()
    step(training)
    return training


@pytest.fixture(scope="module")
def browser(server: Server) -> Browser:
    return Browser(server).log_in()


def saved(training: tinker.TrainingClient, name: str) -> str:
    """Save a checkpoint for sampling; return its path in the console."""
    training.save_weights_for_sampler(name).result()
    return f"/console/runs/{training.model_id}/checkpoints/sampler_weights/{name}"


def listed(server: Server, training: tinker.TrainingClient, name: str) -> dict[str, Any]:
    path = f"/api/v1/training_runs/{training.model_id}/checkpoints"
    found = server.request("GET", path).json()["checkpoints"]
    (one,) = [each for each in found if each["checkpoint_id"] == f"sampler_weights/{name}"]
    return dict(one)


def test_a_checkpoint_is_published_and_made_private_again(
    server: Server, browser: Browser, training: tinker.TrainingClient
) -> None:
    path, began = saved(training, "shared"), datetime.now(UTC)
    page = f"/console/runs/{training.model_id}"
    stranger = server.new_key("stranger")
    archive = path.replace("/console/runs", "/api/v1/training_runs") + "/archive"

    assert server.request("GET", archive, key=stranger).status == 404
    answer = browser.submit(f"{path}/publish")
    assert (answer.status_code, answer.headers["location"]) == (303, f"{page}#checkpoints")
    assert server.request("GET", archive, key=stranger).status == 200
    assert "everybody" in text(browser.get(page))
    assert f"{path}/unpublish" in browser.get(page).text
    assert browser.submit(f"{path}/unpublish").status_code == 303
    assert server.request("GET", archive, key=stranger).status == 404
    assert events(server, began, "sampler_weights/shared") == [
        "checkpoint_publish",
        "checkpoint_unpublish",
    ]


def test_a_checkpoint_is_kept_for_days_or_until_it_is_deleted(
    server: Server, browser: Browser, training: tinker.TrainingClient
) -> None:
    path = saved(training, "kept")

    assert browser.submit(f"{path}/ttl", days="3").status_code == 303
    ends = datetime.fromisoformat(listed(server, training, "kept")["expires_at"])
    assert timedelta(days=2.9) < ends - datetime.now(UTC) < timedelta(days=3.1)
    page = text(browser.get(f"/console/runs/{training.model_id}"))
    assert moment(ends) in page
    for wrong in ("0", "3651", "-1", "x", "1e9", "9" * 5000, "NaN", ""):
        answer = browser.submit(f"{path}/ttl", days=wrong)
        assert (answer.status_code, "days: " in text(answer)) == (400, True), wrong
    assert browser.submit(f"{path}/ttl", unlimited="yes").status_code == 303
    assert listed(server, training, "kept")["expires_at"] is None


def test_commands_do_what_the_page_does(server: Server, training: tinker.TrainingClient) -> None:
    saved(training, "by-command")
    path = f"tinker://{training.model_id}/sampler_weights/by-command"

    def run(*words: str, key: str = API_KEY) -> Result:
        call = ["checkpoints", *words, path, "--base-url", server.url, "--api-key", key]
        return CliRunner().invoke(app, call)

    assert run("publish").stdout == f"everybody may read {path}\n"
    assert listed(server, training, "by-command")["public"] is True
    assert json.loads(run("unpublish", "--json").stdout) == {"tinker_path": path, "public": False}
    assert listed(server, training, "by-command")["public"] is False
    assert run("ttl", "--days", "3").stdout == f"{path} is kept for 3 days\n"
    ends = datetime.fromisoformat(listed(server, training, "by-command")["expires_at"])
    assert timedelta(days=2.9) < ends - datetime.now(UTC) < timedelta(days=3.1)
    assert json.loads(run("ttl", "--never", "--json").stdout)["ttl_seconds"] is None
    assert listed(server, training, "by-command")["expires_at"] is None
    for wrong in ((), ("--days", "3", "--never")):
        assert "--days, --never: choose one of them" in run("ttl", *wrong).stderr
    assert run("ttl", "--days", "0").exit_code == 2
    stranger = server.new_key("stranger")
    for words in (("publish",), ("unpublish",), ("ttl", "--never"), ("delete", "--yes")):
        assert "404: " in run(*words, key=stranger).stderr, words
    assert json.loads(run("delete", "--yes", "--json").stdout) == {"deleted": [path]}


def test_a_checkpoint_is_deleted_only_if_the_box_is_ticked(
    server: Server, browser: Browser, training: tinker.TrainingClient
) -> None:
    path, began = saved(training, "unwanted"), datetime.now(UTC)
    page = f"/console/runs/{training.model_id}"

    answer = browser.submit(f"{path}/delete")
    assert (answer.status_code, "tick the box" in text(answer)) == (400, True)
    assert "sampler_weights/unwanted" in browser.get(page).text
    assert browser.submit(f"{path}/delete", confirmed="yes").status_code == 303
    assert "sampler_weights/unwanted" not in browser.get(page).text
    assert browser.submit(f"{path}/delete", confirmed="yes").status_code == 404
    assert "checkpoint_delete" in events(server, began, "sampler_weights/unwanted")


def test_a_checkpoint_is_downloaded_by_its_signed_url(
    browser: Browser, training: tinker.TrainingClient
) -> None:
    path = saved(training, "packed")
    assert f'href="{path}/archive"' in browser.get(f"/console/runs/{training.model_id}").text

    answer = browser.get(f"{path}/archive")
    assert (answer.status_code, answer.headers["cache-control"]) == (303, "no-store")
    url = answer.headers["location"]
    assert urlsplit(url).path.startswith("/downloads/")
    content = browser.get(url)
    assert "attachment" in content.headers["content-disposition"]
    with tarfile.open(fileobj=io.BytesIO(content.content)) as archive:
        assert "adapter_model.safetensors" in archive.getnames()


def test_a_read_only_key_downloads_checkpoints_and_changes_none(
    server: Server, training: tinker.TrainingClient
) -> None:
    path = saved(training, "fixed")
    browser = read_only_browser(server)

    assert browser.get(f"{path}/archive").status_code == 303
    assert LIFE not in browser.get(f"/console/runs/{training.model_id}").text
    for action in ("publish", "unpublish", "ttl", "delete"):
        answer = browser.submit(f"{path}/{action}", confirmed="yes", unlimited="yes")
        assert (answer.status_code, "is read-only" in text(answer)) == (403, True), action


def test_a_stranger_finds_no_checkpoint(server: Server, training: tinker.TrainingClient) -> None:
    path = saved(training, "hidden")
    stranger = Browser(server).log_in(server.new_key("stranger"))

    assert stranger.get(f"{path}/archive").status_code == 404
    for action in ("publish", "unpublish", "ttl", "delete"):
        answer = stranger.submit(f"{path}/{action}", confirmed="yes", unlimited="yes")
        assert answer.status_code == 404, action
    assert listed(server, training, "hidden")["public"] is False


def test_names_of_checkpoints_that_do_not_exist_are_refused(
    browser: Browser, training: tinker.TrainingClient
) -> None:
    place = f"/console/runs/{training.model_id}/checkpoints"
    for name, status in (
        ("weights/missing", 404),
        ("weights", 400),
        ("other/x", 400),
        ("weights/%3Cscript%3E", 400),
        (f"weights/{'x' * 10_000}", 400),
    ):
        for answer in (
            browser.get(f"{place}/{name}/archive"),
            browser.submit(f"{place}/{name}/publish"),
        ):
            assert (answer.status_code, "<script>" in answer.text) == (status, False), name
            assert len(answer.text) < 3000
