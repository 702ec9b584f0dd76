"""The timeline of a run in the console, in JSON and in a terminal: how long requests took."""

import json
from collections import Counter

import httpx
import pytest
import tinker
from tinker import types
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_testing.clients.console_browser import Browser, text
from tinkercloud_testing.clients.sdk_steps import score, step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(scope="module")
def training(server: Server) -> tinker.TrainingClient:
    """Return a run that has taken two steps and scored a text, and of which a sample was drawn."""
    client = server.client()
    other = client.create_lora_training_client(MODEL, rank=4).result()
    step(other)
    training = client.create_lora_training_client(MODEL, rank=4).result()
    for _ in range(2):
        step(training)
    score(training, [5, 6, 7])
    sampler = training.save_weights_and_get_sampling_client().result()
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, stop=[])).result()
    wait_until(lambda: requests(server, training)[0]["name"] == "sample", "the last request")
    return training


def requests(server: Server, training: tinker.TrainingClient) -> list[dict[str, object]]:
    path = f"/api/v1/runs/{training.model_id}/timeline"
    return list(server.request("GET", path).json()["requests"])


def test_the_timeline_has_the_requests_of_the_run_and_of_its_samplers_only(
    server: Server, training: tinker.TrainingClient
) -> None:
    found = requests(server, training)

    assert Counter(each["name"] for each in found) == {
        "forward_backward": 2,
        "optim_step": 2,
        "forward": 1,
        "save_weights_for_sampler": 1,
        "sample": 1,
    }
    assert {each["target"] == training.model_id for each in found[1:]} == {True}
    for each in found:
        assert float(str(each["wait_seconds"])) >= 0
        assert float(str(each["run_seconds"])) > 0
    path = f"/api/v1/runs/{training.model_id}/timeline"
    assert server.request("GET", f"{path}?limit=1").json()["requests"] == found[:1]
    for wrong in ("0", "1001", "x", "-1"):
        assert server.request("GET", f"{path}?limit={wrong}").status == 400, wrong


def test_the_page_the_json_and_the_command_show_the_same(
    server: Server, training: tinker.TrainingClient
) -> None:
    page = Browser(server).log_in().get(f"/console/runs/{training.model_id}").text
    command = ["runs", "timeline", training.model_id, "--base-url", server.url]
    command += ["--api-key", API_KEY]

    printed = CliRunner().invoke(app, command).stdout
    as_json = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)

    found = requests(server, training)
    assert as_json["requests"] == found
    for each in found:
        for words in (f"{each['wait_seconds']:.3f}", f"{each['run_seconds']:.3f}"):
            assert f'<td class="number">{words}</td>' in page
            assert words in printed
        assert str(each["request_id"]) in page
        assert str(each["request_id"]) in printed
    assert page.count('<rect class="wait"') == page.count('<rect class="execution"') == len(found)


def test_the_link_downloads_the_trace_of_the_session(
    server: Server, training: tinker.TrainingClient
) -> None:
    browser, place = Browser(server).log_in(), f"/console/runs/{training.model_id}"
    assert f'href="{place}/trace"' in browser.get(place).text
    assert "ui.perfetto.dev" in browser.get(place).text

    answer = browser.get(f"{place}/trace")

    assert (answer.status_code, answer.headers["cache-control"]) == (303, "no-store")
    content = httpx.get(answer.headers["location"])
    assert "attachment" in content.headers["content-disposition"]
    names = {each["name"] for each in content.json()["traceEvents"]}
    assert {"queue", "forward_backward", "sample"} <= names


def test_the_timeline_of_others_does_not_exist(
    server: Server, training: tinker.TrainingClient
) -> None:
    key = server.new_key("stranger")
    stranger = Browser(server).log_in(key)

    for run in (training.model_id, "missing", "s:train:0"):
        assert server.request("GET", f"/api/v1/runs/{run}/timeline", key=key).status == 404
        answer = stranger.get(f"/console/runs/{run}/trace")
        assert (answer.status_code, "does not exist" in text(answer)) == (404, True)
