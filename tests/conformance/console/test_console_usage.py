"""The console's pages about what is used: by project with its cost, and by which runs now."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.clients.console_browser import Browser, text
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server with prices, whose usage no other test changes."""
    prices = {"currency": "EUR", "models": {MODEL: {"train": 10**6}}}
    settings = {"TINKERCLOUD_PRICES": json.dumps(prices)}
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}, settings) as running:
        yield running


@pytest.fixture(scope="module")
def training(own_server: Server) -> tinker.TrainingClient:
    """Return a run of ann that has trained four tokens in her project."""
    key = own_server.new_key("ann")
    project_id = own_server.new_project("vision", key)
    client = tinker.ServiceClient(base_url=own_server.url, api_key=key, project_id=project_id)
    training = client.create_lora_training_client(MODEL, rank=4).result()
    step(training)
    return training


def test_a_month_has_its_cost_by_project(
    own_server: Server, training: tinker.TrainingClient
) -> None:
    browser = Browser(own_server).log_in(own_server.new_key("ann"))
    wait_until(lambda: "4.00 EUR" in text(browser.get("/console/usage")), "the usage")

    page = text(browser.get("/console/usage"))
    by_project, _, by_day = page.partition("<h2>Days</h2>")
    assert all('<td class="number">4.0000</td>' in each for each in (by_project, by_day))
    assert re.search(r'<th scope="row">\d{4}-\d\d-\d\d</th><td>ann</td>', by_day)
    assert "vision-" in page
    assert "Nothing was used in this month" in text(browser.get("/console/usage?month=2026-01"))
    assert "?month=2025-12" in browser.get("/console/usage?month=2026-01").text
    for wrong in ("2026-13", "x", "2026-1", "1999-12"):
        answer = browser.get(f"/console/usage?month={wrong}")
        assert (answer.status_code, "month: " in text(answer)) == (400, True), wrong
    stranger = text(Browser(own_server).log_in(own_server.new_key("bob")).get("/console/usage"))
    assert "Nothing was used in this month" in stranger
    assert "vision-" not in stranger
    assert training.model_id not in stranger


def test_models_show_who_is_in_memory_and_other_owners_as_numbers(
    own_server: Server, training: tinker.TrainingClient
) -> None:
    admin = text(Browser(own_server).log_in().get("/console/models"))
    stranger = text(Browser(own_server).log_in(own_server.new_key("bob")).get("/console/models"))

    (found,) = own_server.request("GET", "/api/v1/base_models").json()["base_models"]
    for page in (admin, stranger):
        assert f"{MODEL}" in page
        assert f"<td>{found['state']}</td>" in page
        assert "hold 1 models of all owners in memory" in page
    assert training.model_id in admin
    assert "<td>ann</td>" in admin
    assert found["source"] in admin
    assert training.model_id not in stranger
    assert "ann" not in stranger
    assert found["source"] not in stranger
