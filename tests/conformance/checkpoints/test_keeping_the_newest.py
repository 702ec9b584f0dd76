"""Keeping only the newest checkpoints of a run: by HTTP, by command and in the console."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
import tinker
from typer.testing import CliRunner, Result

from tinkercloud_api.cli import app
from tinkercloud_testing.clients.console_browser import Browser, events, read_only_browser, text
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import API_KEY, Server

MODEL = "tiny/llama"
OTHER = "<script>alert(1)<x>"


@pytest.fixture
def new_run(client: tinker.ServiceClient) -> Callable[[int], tinker.TrainingClient]:
    """Make a run with so many training checkpoints, named by their number."""

    def make(number: int) -> tinker.TrainingClient:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        step(training)
        for each in range(1, number + 1):
            training.save_state(f"n{each}").result()
        return training

    return make


NewRun = Callable[[int], tinker.TrainingClient]


def names(found: list[dict[str, Any]]) -> list[str]:
    return [each["tinker_path"].rpartition("/")[2] for each in found]


def listed(server: Server, training: tinker.TrainingClient) -> list[str]:
    path = f"/api/v1/training_runs/{training.model_id}/checkpoints"
    return names(server.request("GET", path).json()["checkpoints"])


def keep(server: Server, *arguments: str, answer: str = "") -> Result:
    where = ["--base-url", server.url, "--api-key", API_KEY]
    return CliRunner().invoke(app, ["checkpoints", "keep", *arguments, *where], input=answer)


def test_what_was_shown_is_deleted_and_nothing_else(server: Server, new_run: NewRun) -> None:
    training, began = new_run(3), datetime.now(UTC)
    path = f"/api/v1/runs/{training.model_id}/surplus_checkpoints?keep=1"
    shown = server.request("GET", path).json()
    assert (names(shown["checkpoints"]), shown["spared"]) == (["n1", "n2"], [])
    assert listed(server, training) == ["n1", "n2", "n3"]

    training.save_state("n4").result()
    again = f"{path}&until={quote(shown['until'])}"
    assert server.request("DELETE", again).json() == shown

    assert listed(server, training) == ["n3", "n4"]
    assert server.request("DELETE", again).json()["checkpoints"] == []
    assert listed(server, training) == ["n3", "n4"]
    assert events(server, began, f"{training.model_id}/weights/n1") == ["checkpoint_delete"]


def test_what_is_published_or_in_use_stays(
    server: Server, client: tinker.ServiceClient, new_run: NewRun
) -> None:
    training = new_run(4)
    run = training.model_id
    server.request("POST", f"/api/v1/training_runs/{run}/checkpoints/weights/n1/publish")
    client.create_training_client_from_state(f"tinker://{run}/weights/n2").result()

    found = server.request("DELETE", f"/api/v1/runs/{run}/surplus_checkpoints?keep=1").json()

    assert names(found["checkpoints"]) == ["n3"]
    assert names(found["spared"]) == ["n1", "n2"]
    assert listed(server, training) == ["n1", "n2", "n4"]


def test_the_session_that_samples_from_a_checkpoint_is_named(
    server: Server, client: tinker.ServiceClient, new_run: NewRun
) -> None:
    training = new_run(0)
    old = training.save_weights_for_sampler("old").result().path
    training.save_weights_for_sampler("new").result()
    client.create_sampling_client(model_path=old).result()
    session = training.model_id.partition(":")[0]

    kept = keep(server, training.model_id, "1")

    assert kept.stdout.startswith(f"{old} stays: a session that has not ended samples from it: ")
    assert f"{session}; `tinkercloud sessions delete ID` ends it" in kept.stdout


def test_the_command_says_what_goes_and_asks_first(server: Server, new_run: NewRun) -> None:
    training = new_run(3)
    run = training.model_id

    refused = keep(server, run, "2", answer="n\n")
    assert (refused.exit_code, f"{run}/weights/n1 (" in refused.stderr) == (1, True)
    assert "weights/n2" not in refused.stderr
    assert listed(server, training) == ["n1", "n2", "n3"]
    agreed = keep(server, run, "2", answer="y\n")
    assert (agreed.exit_code, agreed.stdout.endswith("deleted 1 checkpoint\n")) == (0, True)
    as_json = json.loads(keep(server, run, "1", "--yes", "--json").stdout)
    assert (names(as_json["checkpoints"]), listed(server, training)) == (["n2"], ["n3"])
    assert keep(server, run, "1").stdout == "deleted 0 checkpoints\n"
    assert keep(server, run, "0").exit_code == 2


def test_a_page_shows_what_goes_and_deletes_it_if_the_box_is_ticked(
    server: Server, new_run: NewRun
) -> None:
    training, browser, began = new_run(2), Browser(server).log_in(), datetime.now(UTC)
    place = f"/console/runs/{training.model_id}"
    form = f"{place}/surplus_checkpoints"
    assert f'action="{form}"' in browser.get(place).text

    page = browser.get(f"{form}?keep=1")
    assert "/weights/n1" in page.text
    assert "/weights/n2" not in page.text
    until = page.text.partition('name="until" value="')[2].partition('"')[0]

    fields = {"keep": "1", "until": until}
    unticked = browser.submit(form, **fields)
    assert (unticked.status_code, "tick the box" in text(unticked)) == (400, True)
    assert browser.send(form, {**fields, "confirmed": "yes"}).status_code == 403
    forged = {**fields, "confirmed": "yes", "form_token": "0" * 64}
    assert browser.send(form, forged).status_code == 403
    assert listed(server, training) == ["n1", "n2"]
    done = browser.submit(form, **fields, confirmed="yes")
    assert (done.status_code, done.headers["location"]) == (303, f"{place}#checkpoints")
    assert listed(server, training) == ["n2"]
    assert "No checkpoint goes" in browser.get(f"{form}?keep=1").text
    assert "checkpoint_delete" in events(server, began, f"{training.model_id}/weights/n1")


def test_others_delete_nothing(server: Server, new_run: NewRun) -> None:
    training, key = new_run(2), server.new_key("stranger")
    fields = {"keep": "1", "until": datetime.now(UTC).isoformat(), "confirmed": "yes"}
    stranger, reader = Browser(server).log_in(key), read_only_browser(server)

    for run in (training.model_id, "missing", "s:train:0", quote(OTHER)):
        path = f"runs/{run}/surplus_checkpoints"
        for method in ("GET", "DELETE"):
            answer = server.request(method, f"/api/v1/{path}?keep=1", key=key)
            assert answer.status == 404, (method, run)
        for page in (
            stranger.get(f"/console/{path}?keep=1"),
            stranger.submit(f"/console/{path}", **fields),
        ):
            assert (page.status_code, "<script>" in page.text) == (404, False), run
    own = f"/console/runs/{training.model_id}/surplus_checkpoints"
    assert "confirmed" not in reader.get(f"{own}?keep=1").text
    assert reader.submit(own, **fields).status_code == 403
    assert listed(server, training) == ["n1", "n2"]


def test_numbers_and_times_that_are_none_are_refused(server: Server, new_run: NewRun) -> None:
    training, browser = new_run(2), Browser(server).log_in()
    path = f"runs/{training.model_id}/surplus_checkpoints"

    for wrong in ("0", "-1", "x", "1.5", "9" * 5000, "NaN", "", OTHER, "100001"):
        for method in ("GET", "DELETE"):
            answer = server.request(method, f"/api/v1/{path}?keep={quote(wrong)}")
            assert (answer.status, "keep" in answer.json()["detail"]) == (400, True), wrong
        page = browser.get(f"/console/{path}?keep={quote(wrong)}")
        assert (page.status_code, "<script>" in page.text) == (400, False), wrong
    for until in ("", "yesterday", "2026-01-01T00:00:00", "9" * 400, OTHER):
        answer = server.request("DELETE", f"/api/v1/{path}?keep=1&until={quote(until)}")
        assert answer.status == 400, until
        sent = browser.submit(f"/console/{path}", keep="1", until=until, confirmed="yes")
        assert (sent.status_code, "<script>" in sent.text) == (400, False), until
    for until in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"):
        answer = server.request("GET", f"/api/v1/{path}?keep=1&until={quote(until)}")
        assert answer.status == 200, until
    assert listed(server, training) == ["n1", "n2"]
