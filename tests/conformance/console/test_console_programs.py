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
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"
RUN = "0123456789abcdef0123456789abcdef:train:0"
REPORT = {
    "step": 3,
    "total_steps": 8,
    "reward": 0.4375,
    "model_id": RUN,
    "metrics": {"solved": 0.25},
    "environments": {SCRIPT: {"difficulty": 2, "prompts": 7}},
}
SOURCE = f"""
import json, os, time, urllib.request
print("x" * 100_000, {SCRIPT!r}, "\\x1b[31mred", "the last line", sep="\\n", flush=True)
path = f"/api/v1/programs/{{os.environ['TINKERCLOUD_PROGRAM_ID']}}/progress"
headers = {{"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"}}
body = json.dumps({REPORT!r}).encode()
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
def program(own_server: Server) -> str:
    """Return the path of the page of a program that runs and has reported."""
    started = own_server.post("programs", {"source": SOURCE, "name": SCRIPT})
    assert started.status == 200, started.body
    path = f"programs/{started.json()['program_id']}"
    shown = f"/api/v1/{path}"
    wait_until(
        lambda: own_server.request("GET", shown).json()["progress"]["step"] == 3, "its report"
    )
    return f"/console/{path}"


def test_a_program_shows_its_progress_and_the_end_of_its_output(
    browser: Browser, program: str
) -> None:
    page = browser.get(program)

    assert "<script>" not in page.text
    assert len(page.text) < 40_000
    words = text(page)
    assert "the last line" in words
    assert "\x1b" not in words
    assert all(each in words for each in ("3 of 8", "0.4375", "solved", "0.25", "Running"))
    assert f'href="/console/runs/{RUN}"' in page.text
    assert browser.get(f"{program}?follow=5").headers["refresh"] == "5"
    listing = browser.get("/console/programs")
    assert f'href="{program}"' in listing.text
    assert "<script>" not in listing.text
    assert browser.get("/console/programs?page=2").status_code == 200
    assert browser.get("/console/programs?page=0").status_code == 400


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
