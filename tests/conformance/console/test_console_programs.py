"""The console's pages about programs: what they print, how far they are, and stopping them."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tinkercloud_testing.clients.console_browser import (
    SCRIPT,
    Browser,
    events,
    read_only_browser,
    text,
)
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server

MODEL = "tiny/llama"
REPORT = {
    "step": 3,
    "total_steps": 8,
    "reward": 0.4375,
    "metrics": {"solved": 0.25},
    "environments": {SCRIPT: {"difficulty": 2, "prompts": 7}},
}
SOURCE = f"""
import json, os, sys, time, urllib.request
print("x" * 100_000, {SCRIPT!r}, "\\x1b[31mred", "the last line", sep="\\n", flush=True)
path = f"/api/v1/programs/{{os.environ['TINKERCLOUD_PROGRAM_ID']}}/progress"
headers = {{"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"}}
lost = {{"model_id": "of-nobody", "step": 1, "reward": 1}}
for report in (lost, {{"step": 2, "reward": 0.25}}, {REPORT!r}):
    body = json.dumps({{"model_id": sys.argv[1], **report}}).encode()
    request = urllib.request.Request(os.environ["TINKER_BASE_URL"] + path, body, headers)
    urllib.request.urlopen(request)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server whose admins may run files."""
    settings = {"TINKERCLOUD_PROGRAMS__ALLOW_CODE": "true"}
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}, settings) as running:
        yield running


@pytest.fixture(scope="module")
def browser(own_server: Server) -> Browser:
    return Browser(own_server).log_in()


@pytest.fixture(scope="module")
def run(own_server: Server) -> str:
    """Return the id of the run that the program trains."""
    return str(own_server.client().create_lora_training_client(MODEL, rank=4).result().model_id)


@pytest.fixture(scope="module")
def program(own_server: Server, run: str) -> str:
    """Return the path of the page of a program that runs and has reported."""
    started = own_server.post("programs", {"source": SOURCE, "name": SCRIPT, "args": [run]})
    assert started.status == 200, started.body
    path = f"programs/{started.json()['program_id']}"
    shown = f"/api/v1/{path}"
    wait_until(
        lambda: own_server.request("GET", shown).json()["progress"]["step"] == 3, "its report"
    )
    return f"/console/{path}"


@pytest.mark.long
def test_a_program_shows_its_progress_and_the_end_of_its_output(
    browser: Browser, program: str, run: str
) -> None:
    page = browser.get(program)

    assert "<script>" not in page.text
    assert len(page.text) < 40_000
    words = text(page)
    assert "the last line" in words
    assert "\x1b" not in words
    assert all(each in words for each in ("3 of 8", "0.4375", "solved", "0.25", "Running"))
    assert f'href="/console/runs/{run}"' in page.text
    assert browser.get(f"{program}?follow=5").headers["refresh"] == "5"
    listing = browser.get("/console/programs")
    assert f'href="{program}"' in listing.text
    assert "<script>" not in listing.text
    assert browser.get("/console/programs?page=2").status_code == 200
    assert browser.get("/console/programs?page=0").status_code == 400


def test_the_rewards_of_a_program_are_a_curve_of_its_run(
    own_server: Server, browser: Browser, program: str, run: str
) -> None:
    page = text(browser.get(program))
    command = ["rewards", program.rpartition("/")[2], "--json"]
    where = ["--base-url", own_server.url, "--api-key", API_KEY]
    printed = json.loads(own_server.command("programs", *command, *where))
    logged = own_server.request("GET", f"/api/v1/runs/{run}/curve").json()["logged"]["reward"]

    assert [(each["step"], each["value"]) for each in logged] == [(2, 0.25), (3, 0.4375)]
    assert printed == logged
    assert f"reward by step; {run}: 0.25 at first, 0.4375 at last" in page
    for step, reward in ((2, "0.25"), (3, "0.4375")):
        row = f'<th scope="row" class="number">{step}</th><td class="number">{reward}</td>'
        assert row in page
    assert f"reward by step; {run}: " in text(browser.get(f"/console/runs/{run}"))


def test_strangers_find_no_program_and_readers_stop_none(own_server: Server, program: str) -> None:
    stranger = Browser(own_server).log_in(own_server.new_key("stranger"))
    reader = read_only_browser(own_server)

    assert stranger.get(program).status_code == 404
    assert program not in stranger.get("/console/programs").text
    assert stranger.submit(f"{program}/stop").status_code == 404
    assert "Stop it" not in reader.get(program).text
    assert reader.submit(f"{program}/stop").status_code == 403
    assert "Running" in reader.get(program).text


def test_a_program_is_stopped_with_a_form(
    own_server: Server, browser: Browser, program: str
) -> None:
    began = datetime.now(UTC)
    assert "Stop it" in browser.get(program).text

    answer = browser.submit(f"{program}/stop")

    assert (answer.status_code, answer.headers["location"]) == (303, program)
    page = text(browser.get(program))
    assert "stopped by its owner" in page
    assert "Stop it" not in page
    program_id = program.rpartition("/")[2]
    assert events(own_server, began, json.dumps(program_id)) == ["program_stop"]
