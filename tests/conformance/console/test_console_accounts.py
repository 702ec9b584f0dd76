"""The console's pages about keys, limits, and projects with their members."""

import secrets
from datetime import UTC, datetime

import pytest

from tinkercloud_testing.clients.console_browser import (
    SCRIPT,
    Browser,
    events,
    read_only_browser,
    text,
)
from tinkercloud_testing.serving.servers import Server


@pytest.fixture(scope="module")
def browser(server: Server) -> Browser:
    return Browser(server).log_in(server.new_key("founder"))


def new_project(browser: Browser, name: str = "Vision") -> str:
    """Create a project with the form; return the path of its page."""
    answer = browser.submit("/console/projects", name=name, project_id=f"p-{secrets.token_hex(4)}")
    assert answer.status_code == 303, text(answer)
    return answer.headers["location"]


def test_an_account_shows_its_key_and_what_only_an_admin_can_do(
    server: Server, browser: Browser
) -> None:
    own = text(browser.get("/console/account"))
    assert "founder, number" in own
    assert "until</dt><dd>it is revoked" in own
    assert "No limit is set for founder" in own
    assert "tinkercloud keys list" in own
    assert "tinkercloud users list" not in own
    admin = Browser(server).log_in()
    assert "tinkercloud users list" in text(admin.get("/console/account"))


def test_a_key_is_revoked_only_if_the_box_is_ticked(server: Server) -> None:
    began, key = datetime.now(UTC), server.new_key("leaver")
    browser = Browser(server).log_in(key)

    assert browser.submit("/console/account/revoke").status_code == 400
    assert server.request("GET", "/api/v1/projects", key=key).status == 200
    answer = browser.submit("/console/account/revoke", confirmed="yes")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
    assert server.request("GET", "/api/v1/projects", key=key).status == 401
    assert browser.get("/console/account").status_code == 401
    other = server.new_key("leaver")
    assert events(server, began, "/console/account/revoke", other) == ["key_revoke", "key_revoke"]


def test_a_project_is_created_renamed_and_deleted(server: Server, browser: Browser) -> None:
    began = datetime.now(UTC)
    page = new_project(browser, SCRIPT)
    project_id = page.rpartition("/")[2]

    listing = browser.get("/console/projects")
    assert "<script>" not in listing.text
    assert '<script>alert("x")</script>\ufffd\ufffd' in text(listing)
    assert f'href="{page}"' in listing.text
    assert browser.submit(f"{page}/rename", name="Sight").status_code == 303
    shown = server.request("GET", f"/api/v1/projects/{project_id}", key=founder(server)).json()
    assert shown["name"] == "Sight"
    assert browser.submit(f"{page}/delete").status_code == 400
    assert browser.submit(f"{page}/delete", confirmed="yes").status_code == 303
    assert browser.get(page).status_code == 404
    done = events(server, began, project_id, founder(server))
    assert {*done} == {"project_create", "project_rename", "project_delete"}


def founder(server: Server) -> str:
    return server.new_key("founder")


def test_members_are_added_get_a_role_and_leave(server: Server, browser: Browser) -> None:
    page = new_project(browser)
    member = Browser(server).log_in(server.new_key("guest"))
    assert member.get(page).status_code == 404

    assert browser.submit(f"{page}/members", owner="guest", role="viewer").status_code == 303
    assert "Leave the project" in member.get(page).text
    assert "Delete the project" not in member.get(page).text
    assert member.submit(f"{page}/members", owner="friend", role="admin").status_code == 403
    assert browser.submit(f"{page}/members", owner="guest", role="admin").status_code == 303
    assert "Delete the project" in member.get(page).text
    answer = member.submit(f"{page}/members/remove", owner="guest")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/projects")
    assert member.get(page).status_code == 404
    answer = browser.submit(f"{page}/members/remove", owner="founder")
    assert (answer.status_code, "<h1>" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("action", "fields", "named"),
    [
        ("members", {"owner": "guest", "role": "king"}, "role: "),
        ("members", {"role": "member"}, "owner: "),
        ("members", {"owner": "x" * 1000, "role": "member"}, "owner: "),
        ("members/remove", {}, "owner: "),
        ("rename", {}, "name: "),
        ("rename", {"name": "x" * 1_000_000}, "name: "),
        ("rename", {"name": "a\0b"}, "name: "),
    ],
)
def test_fields_that_are_wrong_are_named(
    browser: Browser, action: str, fields: dict[str, str], named: str
) -> None:
    answer = browser.submit(f"{new_project(browser)}/{action}", **fields)

    assert (answer.status_code, named in text(answer)) == (400, True)
    assert len(answer.text) < 3000


def test_strangers_find_no_project_and_readers_change_none(
    server: Server, browser: Browser
) -> None:
    page = new_project(browser)
    stranger = Browser(server).log_in(server.new_key("stranger"))
    reader = read_only_browser(server, "founder")

    assert stranger.get(page).status_code == 404
    assert page not in stranger.get("/console/projects").text
    assert reader.get(page).status_code == 200
    assert "<form" not in reader.get(page).text.partition("<main")[2]
    for action in ("rename", "delete", "members", "members/remove"):
        fields = {"name": "x", "owner": "founder", "role": "member", "confirmed": "yes"}
        assert stranger.submit(f"{page}/{action}", **fields).status_code == 404, action
        assert reader.submit(f"{page}/{action}", **fields).status_code == 403, action
    assert reader.submit("/console/projects", name="x").status_code == 403
    assert reader.submit("/console/account/revoke", confirmed="yes").status_code == 403
