"""What every page of the console keeps, whichever it is: pages are found by their links."""

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tinkercloud_testing.clients.browsers import Observed, Open
from tinkercloud_testing.clients.console_runs import ATTACK, Runs
from tinkercloud_testing.serving.servers import Server

PHONE = {"viewport": {"width": 380, "height": 800}}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": PHONE,
}
_OPEN_DETAILS = "document.querySelectorAll('details').forEach(each => each.open = true)"
_WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"


def pages(window: Page, runs: Runs) -> Iterator[str]:
    """Open each page with all that it can unfold, and yield its address."""
    window.goto("/console/runs")
    links = window.locator("nav[aria-label=Pages] a").all()
    linked = [str(link.get_attribute("href")) for link in links]
    assert len(linked) >= 3
    for path in (
        *linked,
        *(f"/console/runs/{run}" for run in (runs.learning, runs.lost, runs.waiting)),
        f"/console/runs/{runs.learning}?from=2&to=2",
        f"/console/runs/{runs.learning}/surplus_checkpoints?keep=1",
        f"/console/compare?run={runs.learning}&run={runs.other}",
        "/console/runs?search=no-such-run",
        "/console/runs/missing",
        "/console/login?link=x",
    ):
        window.goto(path)
        window.evaluate(_OPEN_DETAILS)
        yield path


@pytest.mark.parametrize("look", LOOKS)
def test_no_page_excludes_people_with_disabilities(logged_in: Open, runs: Runs, look: str) -> None:
    window, found = logged_in(**LOOKS[look]), {}
    for path in pages(window, runs):
        answer = Axe().run(window)
        found[path] = answer.generate_report() if answer.violations_count else None

    assert {path: report for path, report in found.items() if report} == {}


def test_no_page_is_wider_than_a_phone(logged_in: Open, runs: Runs) -> None:
    window = logged_in(**PHONE)
    widths = {path: window.evaluate(_WIDTHS) for path in pages(window, runs)}

    assert {path: each for path, each in widths.items() if each[0] > each[1]} == {}


def test_pages_load_nothing_from_elsewhere_and_break_no_rule_of_their_own(
    logged_in: Open, runs: Runs, server: Server, observed: Observed
) -> None:
    assert list(pages(logged_in(), runs)) != []

    assert observed.origins == {server.url}
    assert observed.errors == []


def test_names_that_are_pages_run_nothing(logged_in: Open, runs: Runs, observed: Observed) -> None:
    window = logged_in()
    shown = [path for path in pages(window, runs) if window.get_by_text(ATTACK).count()]

    assert observed.dialogs == []
    assert {"/console/runs", "/console/sessions"} <= set(shown)
    assert f"/console/runs/{runs.learning}" in shown
