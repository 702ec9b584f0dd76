"""The tasks of the console, done with the keyboard alone, and its sessions in real browsers."""

import json
import re

import pytest
from playwright.sync_api import Page, expect

from tinkercloud_testing.clients.browsers import Keyboard, Open
from tinkercloud_testing.clients.console_runs import MODEL, Runs, trained
from tinkercloud_testing.serving.servers import API_KEY, Server


def link(server: Server) -> str:
    printed = server.command("console", "--base-url", server.url, "--api-key", API_KEY, "--json")
    return str(json.loads(printed)["url"])


def heading(window: Page, name: str) -> None:
    """Wait for the page with a heading."""
    expect(window.get_by_role("heading", level=1)).to_have_text(name)


def test_a_key_is_entered_with_the_keyboard(anonymous: Open) -> None:
    window = anonymous()
    window.goto("/console/login")

    Keyboard(window).fill(window.get_by_label("API key"), API_KEY)

    heading(window, "Runs")


def test_a_run_is_found_with_the_keyboard(logged_in: Open, runs: Runs) -> None:
    window = logged_in()
    window.goto("/console/runs")

    Keyboard(window).fill(window.get_by_role("searchbox"), runs.other)
    expect(window.get_by_role("row")).to_have_count(2)
    Keyboard(window).press(window.get_by_role("link", name=runs.other))

    heading(window, f"Run {runs.other}")


def test_the_points_of_some_steps_are_read_with_the_keyboard(logged_in: Open, runs: Runs) -> None:
    window = logged_in()
    window.goto(f"/console/runs/{runs.learning}")
    rows = window.locator("[aria-label=Points] tbody tr")

    Keyboard(window).press(window.get_by_text("All points as a table"))
    expect(rows).to_have_count(3)
    expect(rows.first).to_be_visible()
    Keyboard(window).press(window.get_by_role("link", name="Last half"))
    Keyboard(window).press(window.get_by_text("These points as a table"))
    expect(rows).to_have_count(1)
    Keyboard(window).fill(window.get_by_label("Steps from"), "2")
    expect(rows).to_have_count(2)
    Keyboard(window).press(window.get_by_role("link", name="Whole run"))
    expect(rows).to_have_count(3)


def test_a_run_is_saved_with_the_keyboard(logged_in: Open, server: Server) -> None:
    window, run = logged_in(), trained(server, MODEL, steps=1)
    window.goto(f"/console/runs/{run}")

    Keyboard(window).press(window.get_by_role("button", name="Save a checkpoint"))

    expect(window.get_by_text(f"{run}/weights/saved-step-000001").first).to_be_visible()


def test_old_checkpoints_are_deleted_with_the_keyboard(logged_in: Open, server: Server) -> None:
    window, run = logged_in(), trained(server, MODEL, steps=1)
    for name in ("first", "second", "third"):
        assert server.post(f"runs/{run}/save", {"name": name}).status == 200
    window.goto(f"/console/runs/{run}")

    Keyboard(window).fill(window.get_by_label("Keep the newest"), "2")
    rows = window.get_by_role("region", name="Checkpoints that go").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(f"{run}/weights/first")
    Keyboard(window).press(window.get_by_label("Their files can't be restored"), "Space")
    Keyboard(window).press(window.get_by_role("button", name="Delete this checkpoint"))

    heading(window, f"Run {run}")
    shown = window.get_by_role("region", name="Checkpoints")
    expect(shown.get_by_text(f"{run}/weights/third")).to_be_visible()
    expect(shown.get_by_text(f"{run}/weights/first")).to_have_count(0)


def test_runs_are_compared_with_the_keyboard(logged_in: Open, runs: Runs) -> None:
    window = logged_in()
    window.goto("/console/runs")

    for run in (runs.learning, runs.other):
        Keyboard(window).press(window.get_by_role("checkbox", name=f"Compare {run}"), "Space")
    Keyboard(window).press(window.get_by_role("button", name="Compare the chosen runs"))

    heading(window, "Compare")
    compared = rf"^loss by step;(?=.* {runs.learning}: )(?=.* {runs.other}: )"
    expect(window.get_by_role("img").first).to_have_accessible_name(re.compile(compared))
    Keyboard(window).press(window.get_by_text("Points as tables"))
    expect(window.get_by_role("table", name="loss")).to_be_visible()


@pytest.mark.usefixtures("runs")
def test_the_link_of_the_command_logs_a_browser_in_once(anonymous: Open, server: Server) -> None:
    address, window = link(server), anonymous()
    window.goto(address)
    with window.expect_request(lambda request: request.method == "POST") as form:
        window.get_by_role("button", name="Open the console").click()
    heading(window, "Runs")

    sent = form.value.all_headers()
    assert (sent["origin"], sent["sec-fetch-site"]) == (server.url, "same-origin")
    (cookie,) = window.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/console")
    second = anonymous()
    second.goto(address)
    second.get_by_role("button", name="Open the console").click()
    expect(second.get_by_role("alert")).to_contain_text("this link was used")


def test_logging_out_everywhere_ends_the_sessions_of_other_browsers(
    anonymous: Open, server: Server
) -> None:
    key, windows = server.new_key("traveller"), [anonymous(), anonymous()]
    for window in windows:
        window.goto("/console/login")
        window.get_by_label("API key").fill(key)
        window.get_by_role("button", name="Log in").click()
        heading(window, "Runs")
    here, there = windows

    here.get_by_role("button", name="Log out everywhere").click()
    heading(here, "Log in")
    there.get_by_role("link", name="Usage").click()

    heading(there, "Log in")
    expect(there.get_by_role("alert")).to_have_text("log in to see this page")
