"""The pages about users in a browser: their tasks with the keyboard, and rules of accessibility."""

import re
import secrets

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tinkercloud_testing.clients.browsers import Keyboard, Observed, Open
from tinkercloud_testing.clients.console_runs import ATTACK
from tinkercloud_testing.serving.servers import Server


def heading(window: Page, name: str) -> None:
    """Wait for the page with a heading."""
    expect(window.get_by_role("heading", level=1)).to_have_text(name)


def check(window: Page) -> None:
    """Check that a page excludes nobody."""
    answer = Axe().run(window)
    assert answer.violations_count == 0, answer.generate_report()


def use(server: Server, key: str) -> int:
    return server.request("GET", "/api/v1/projects", key=key).status


def test_a_key_is_made_replaced_and_revoked_with_the_keyboard(
    logged_in: Open, server: Server
) -> None:
    window, owner = logged_in(), f"reader-{secrets.token_hex(4)}"
    window.goto("/console/runs")
    Keyboard(window).press(window.get_by_role("link", name="Users"))
    heading(window, "Users")
    Keyboard(window).go_to(window.get_by_label("User", exact=True))
    window.keyboard.type(owner)
    Keyboard(window).fill(window.get_by_label("Name of the key"), "laptop")

    heading(window, f"New key of {owner}")
    key = window.get_by_role("region", name="The new key").inner_text()
    assert use(server, key) == 200
    Keyboard(window).press(window.get_by_role("link", name="All keys"))
    heading(window, f"User {owner}")
    Keyboard(window).press(window.get_by_label(re.compile("^Change key")))
    Keyboard(window).press(window.get_by_role("button", name="Replace it"))
    second = window.get_by_role("region", name="The new key").inner_text()
    Keyboard(window).press(window.get_by_role("link", name="All keys"))
    rows = window.get_by_role("region", name="Keys").locator("tbody tr")
    expect(rows).to_have_count(2)
    Keyboard(window).press(window.get_by_label(re.compile("^Change key")).last)
    Keyboard(window).press(rows.last.get_by_label("Its programs and clients"), "Space")
    Keyboard(window).press(rows.last.get_by_role("button", name="Revoke"))

    expect(rows.last).to_contain_text("revoked")
    assert (use(server, key), use(server, second)) == (401, 200)


def test_a_user_is_found_disabled_and_enabled(logged_in: Open, server: Server) -> None:
    owner = f"leaver-{secrets.token_hex(4)}"
    window, key = logged_in(), server.new_key(owner)
    window.goto("/console/users")
    Keyboard(window).fill(window.get_by_role("searchbox"), owner)
    expect(window.get_by_role("row")).to_have_count(2)
    window.get_by_role("link", name=owner).click()

    window.get_by_role("button", name="Disable").click()
    expect(window.get_by_text("all keys are refused")).to_be_visible()
    assert use(server, key) == 401
    window.get_by_role("button", name="Enable").click()
    expect(window.get_by_role("button", name="Disable")).to_be_visible()
    assert use(server, key) == 200


def test_pages_about_users_exclude_nobody_and_run_nothing(
    logged_in: Open, server: Server, observed: Observed
) -> None:
    owner = f"{secrets.token_hex(4)} {ATTACK}"
    server.new_key(owner)
    for settings in ({}, {"color_scheme": "dark"}, {"viewport": {"width": 380, "height": 820}}):
        window = logged_in(**settings)
        window.goto(f"/console/users?search={owner[:8]}")
        check(window)
        window.get_by_role("link", name=owner[:8]).click()
        window.get_by_label(re.compile("^Change key")).first.click()
        check(window)
        window.get_by_label("Name of the key").fill(ATTACK)
        window.get_by_role("button", name="Create the key").click()
        expect(window.get_by_role("region", name="The new key")).to_be_visible()
        check(window)

    assert (observed.dialogs, observed.errors, observed.origins) == ([], [], {server.url})
