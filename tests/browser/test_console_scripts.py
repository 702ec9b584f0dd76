"""What pages of the console do with scripts, and what remains without them."""

import re
from collections.abc import Iterator

import pytest
import tinker
from playwright.sync_api import Locator, Page, expect

from tinkercloud_testing.clients.browsers import Observed, Open
from tinkercloud_testing.clients.console_runs import MODEL, Runs
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import API_KEY, Server

RANGED = {
    "name": "one",
    "number": 0,
    "steps": [1, 2, 3],
    "means": [4.0, None, 2.0],
    "lows": [3.0, None, 2.0],
    "highs": [5.0, None, 2.0],
}
"""Numbers of a chart: only long runs have points of several steps."""
DRAW_OTHERS = """(figure, numbers) => {
  figure.dataset.numbers = JSON.stringify(numbers);
  figure.classList.remove("drawn");
  draw();
}"""


@pytest.fixture
def training(server: Server) -> tinker.TrainingClient:
    """Return a run that has taken a step."""
    client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
    server.clients.made.append(client)
    training = client.create_lora_training_client(MODEL, rank=4).result()
    step(training)
    return training


@pytest.fixture(autouse=True)
def _nothing_fails(observed: Observed, server: Server) -> Iterator[None]:
    yield
    assert (observed.errors, observed.dialogs, observed.origins) == ([], [], {server.url})


def figure(window: Page, metric: str) -> Locator:
    return window.locator("figure").filter(has_text=f"{metric} by step")


def point_at(chart: Locator, share: float) -> None:
    """Move the mouse to a place of a chart: 0 is its left edge, 1 its right one."""
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    x = 1 + share * (box["width"] - 2)
    chart.locator(".u-over").hover(position={"x": x, "y": box["height"] / 2})


def zoom(window: Page, chart: Locator, first: float, last: float) -> None:
    """Drag the mouse from one place of a chart to another."""
    point_at(chart, first)
    window.mouse.down()
    point_at(chart, last)
    window.mouse.up()


def values(chart: Locator) -> Locator:
    """Return what a chart says about the place of the mouse."""
    return chart.locator(".u-legend .u-value:visible")


def means(server: Server, run: str, metric: str) -> list[float]:
    points = server.request("GET", f"/api/v1/runs/{run}/curve").json()["points"]
    return [point["metrics"][metric]["mean"] for point in points]


def test_a_chart_shows_the_values_at_the_mouse(logged_in: Open, runs: Runs, server: Server) -> None:
    window = logged_in()
    window.goto(f"/console/runs/{runs.learning}")
    chart = figure(window, "loss")

    expect(chart.locator("canvas")).to_be_visible()
    expect(chart.locator("svg")).to_be_hidden()
    summary = re.compile(f"^loss by step; {runs.learning}: ")
    expect(chart.get_by_role("img")).to_have_accessible_name(summary)
    expect(values(chart)).to_have_text(["-", "-"])
    for number, mean in enumerate(means(server, runs.learning, "loss")):
        point_at(chart, number / 2)
        expect(values(chart)).to_have_text([str(number + 1), f"{mean:.5g}"])


def test_a_comparison_shows_the_values_of_each_run_in_its_colour(
    logged_in: Open, runs: Runs, server: Server
) -> None:
    window = logged_in(color_scheme="dark")
    window.goto(f"/console/compare?run={runs.learning}&run={runs.other}")
    chart = figure(window, "loss")

    point_at(chart, 0)

    shown = [f"{means(server, run, 'loss')[0]:.5g}" for run in (runs.learning, runs.other)]
    expect(values(chart)).to_have_text(["1", *shown])
    markers = chart.locator(".u-legend tr:visible .u-marker")
    expect(markers.nth(1)).to_have_css("border-top-color", "rgb(0, 114, 178)")
    expect(markers.nth(2)).to_have_css("border-top-color", "rgb(213, 94, 0)")


def test_dragging_zooms_in_and_a_double_click_shows_all_steps(logged_in: Open, runs: Runs) -> None:
    window = logged_in()
    window.goto(f"/console/runs/{runs.learning}")
    chart = figure(window, "grad_norm")

    zoom(window, chart, 0.4, 0.9)
    point_at(chart, 0)
    expect(values(chart).first).to_have_text("2")
    chart.locator(".u-over").dblclick()
    point_at(chart, 0)
    expect(values(chart).first).to_have_text("1")


def test_numbers_that_no_canvas_can_show_are_drawn_by_the_server(
    logged_in: Open, server: Server, training: tinker.TrainingClient
) -> None:
    run, huge = training.model_id, 1.7e308
    for number, value in enumerate((huge, -huge, 0.0), 1):
        logged = {"huge": value, "tiny": value * 2e-323 / huge, "loss": 1.0, "large": value / 1e250}
        sent = {"step": number, "metrics": logged}
        assert server.post(f"runs/{run}/metrics", sent).status == 200
    window = logged_in()
    window.goto(f"/console/runs/{run}")

    expect(figure(window, "huge").locator("svg")).to_be_visible()
    expect(figure(window, "huge").locator("canvas")).to_have_count(0)
    for metric in ("tiny", "large"):
        expect(figure(window, metric).locator("canvas")).to_be_visible()


def test_a_chart_shows_ranges_and_leaves_gaps(logged_in: Open, runs: Runs) -> None:
    window = logged_in()
    window.goto(f"/console/runs/{runs.learning}")
    chart = figure(window, "loss")
    expect(chart.locator("canvas")).to_be_visible()
    chart.evaluate(DRAW_OTHERS, [RANGED, {**RANGED, "name": "other", "steps": [1, 3, 4]}])

    for place, shown in enumerate(
        (
            ["1", "4 (3 to 5)", "4 (3 to 5)"],
            ["2", "-", "4 (3 to 5)"],
            ["3", "2", "-"],
            ["4", "2", "2"],
        )
    ):
        point_at(chart, place / 3)
        expect(values(chart)).to_have_text(shown)


def test_a_page_shows_new_steps_and_keeps_what_is_open_zoomed_and_focused(
    logged_in: Open, server: Server, training: tinker.TrainingClient
) -> None:
    window, run = logged_in(), training.model_id
    for _ in range(2):
        step(training)
    window.goto(f"/console/runs/{run}")
    chart, rows = figure(window, "loss"), window.locator("[aria-label=Points] tbody tr")
    expect(rows).to_have_count(3)
    window.evaluate("document.body.dataset.kept = 'yes'")
    window.get_by_text("All points as a table").click()
    window.get_by_text("End the run").click()
    zoom(window, chart, 0.4, 0.9)
    point_at(chart, 0)
    expect(values(chart).first).to_have_text("2")
    window.get_by_label("Points", exact=True).focus()

    step(training)

    expect(rows).to_have_count(4)
    expect(window.locator("dd").nth(3)).to_have_text("4, 4 in no checkpoint")
    expect(rows.last).to_be_visible()
    expect(window.get_by_role("button", name="Save it and end it")).to_be_visible()
    expect(window.locator("body[data-kept]")).to_have_count(1)
    expect(window.get_by_label("Points", exact=True)).to_be_focused()
    point_at(chart, 0)
    expect(values(chart).first).to_have_text("2")
    chart.locator(".u-over").dblclick()
    point_at(chart, 1)
    expect(values(chart)).to_have_text(["4", f"{means(server, run, 'loss')[-1]:.5g}"])


def test_a_list_shows_new_runs_unless_some_are_chosen(
    logged_in: Open, runs: Runs, server: Server
) -> None:
    window = logged_in()
    window.goto("/console/runs")
    chosen = window.get_by_role("checkbox", name=f"Compare {runs.other}")
    chosen.check()
    client = server.client()
    new = str(client.create_lora_training_client(MODEL, rank=4).result().model_id)
    with window.expect_response(lambda answer: answer.url.endswith("/console/runs")):
        pass
    expect(chosen).to_be_checked()
    expect(window.get_by_role("link", name=new)).to_have_count(0)

    chosen.uncheck()
    window.get_by_role("searchbox").focus()

    expect(window.get_by_role("link", name=new)).to_be_visible()


def test_a_page_says_why_it_is_not_refreshed(logged_in: Open, observed: Observed) -> None:
    window = logged_in()
    window.goto("/console/problems")
    state = window.get_by_role("status")
    switch = window.get_by_role("checkbox", name="Refresh every 5 seconds")
    expect(state).to_have_text("")
    window.context.set_offline(True)
    expect(state).to_have_text("Not refreshed: the server is away.")
    window.context.set_offline(False)
    expect(state).to_have_text("")
    expect(switch).to_be_checked()

    window.context.clear_cookies()

    expect(state).to_have_text("Not refreshed: the server responded with 401.")
    expect(switch).not_to_be_checked()
    # What htmx says about each.
    assert observed.errors != []
    observed.errors.clear()


def test_sessions_are_searched_with_the_keyboard(logged_in: Open, runs: Runs) -> None:
    window = logged_in()
    window.goto("/console/sessions")
    window.get_by_label("Status").select_option("waiting")
    window.get_by_label("Owner", exact=True).press("Enter")

    listed = window.get_by_role("region", name="Sessions")
    expect(listed.get_by_role("link", name=runs.waiting)).to_be_visible()
    expect(listed.get_by_role("link", name=runs.learning)).to_have_count(0)


def test_without_scripts_pages_have_charts_and_forms(logged_in: Open, runs: Runs) -> None:
    window = logged_in(java_script_enabled=False)
    window.goto(f"/console/runs/{runs.learning}")

    expect(figure(window, "loss").locator("svg")).to_be_visible()
    expect(window.locator("canvas")).to_have_count(0)
    expect(window.get_by_text("Refresh every 5 seconds")).to_be_hidden()
    expect(window.get_by_text("Point at a chart")).to_be_hidden()
    window.get_by_label("Steps from").fill("2")
    window.get_by_role("button", name="Show", exact=True).click()
    expect(window.locator("[aria-label=Points] tbody tr")).to_have_count(2)
    window.get_by_role("link", name="Load again every 5 seconds").click()
    expect(window.get_by_text("Loaded again every 5 seconds.")).to_be_visible()
