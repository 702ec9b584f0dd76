"""The console's pages about users and their keys, which are for admins."""

import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.parse import quote

import httpx
import pytest

from tinkercloud_testing.clients.console_browser import (
    SCRIPT,
    Browser,
    events,
    read_only_browser,
    text,
)
from tinkercloud_testing.serving.servers import Server

KEY = re.compile(r'aria-label="The new key">(tml-[\w-]{43})<')


@pytest.fixture(scope="module")
def browser(server: Server) -> Browser:
    return Browser(server).log_in()


@pytest.fixture
def owner() -> str:
    return f"u{secrets.token_hex(4)}"


def page_of(owner: str) -> str:
    return f"/console/users/{quote(owner, safe='')}"


def new_key(browser: Browser, owner: str, **fields: str) -> tuple[str, str]:
    """Create a key with the form; return the key and the path of its forms."""
    answer = browser.submit("/console/users", owner=owner, name="laptop", role="user", **fields)
    assert answer.status_code == 200, text(answer)
    (key,) = KEY.findall(answer.text)
    (number,) = re.findall(r"laptop, number (\d+)", answer.text)
    return key, f"{page_of(owner)}/keys/{number}"


def use(server: Server, key: str) -> int:
    return server.request("GET", "/api/v1/projects", key=key).status


def test_a_new_key_is_shown_once(server: Server, browser: Browser, owner: str) -> None:
    began = datetime.now(UTC)
    key, _ = new_key(browser, owner, days="30")

    assert use(server, key) == 200
    for path in (page_of(owner), "/console/users", "/console/account"):
        assert key not in browser.get(path).text
    assert key not in str(server.request("GET", "/api/v1/audit").body)
    assert events(server, began, f"user {owner}") == ["key_create"]
    row = text(browser.get(page_of(owner)))
    assert "laptop" in row
    assert f'href="{page_of(owner)}"' in browser.get(f"/console/users?search={owner}").text


def test_a_key_is_replaced_and_then_revoked_if_the_box_is_ticked(
    server: Server, browser: Browser, owner: str
) -> None:
    key, forms = new_key(browser, owner)
    (second,) = KEY.findall(browser.submit(f"{forms}/rotate", hours="1").text)

    assert browser.submit(f"{forms}/revoke").status_code == 400
    assert (use(server, key), use(server, second)) == (200, 200)
    answer = browser.submit(f"{forms}/revoke", confirmed="yes")
    assert (answer.status_code, answer.headers["location"]) == (303, page_of(owner))
    assert (use(server, key), use(server, second)) == (401, 200)
    assert browser.submit(f"{forms}/revoke", confirmed="yes").status_code == 404


def test_a_user_is_disabled_and_enabled(server: Server, browser: Browser, owner: str) -> None:
    key, _ = new_key(browser, owner)
    own = Browser(server).log_in(key)

    assert browser.submit(f"{page_of(owner)}/disable").status_code == 303
    assert (use(server, key), own.get("/console/runs").status_code) == (401, 401)
    assert "all keys are refused" in browser.get(page_of(owner)).text
    assert browser.submit(f"{page_of(owner)}/enable").status_code == 303
    assert use(server, key) == 200


def test_admins_see_no_form_that_would_shut_them_out(browser: Browser) -> None:
    page = browser.get("/console/users/bootstrap")

    assert "of this session" in page.text
    assert "bootstrap/disable" not in page.text
    assert browser.submit("/console/users/bootstrap/disable").status_code == 400


def test_names_that_are_attacks_are_text_and_lead_to_their_pages(
    server: Server, browser: Browser
) -> None:
    owner = f"{secrets.token_hex(4)}/{SCRIPT}"
    answer = browser.submit("/console/users", owner=owner, name=SCRIPT, role="user")

    shown = [answer, browser.get(f"/console/users?search={quote(owner[:8])}")]
    shown.append(browser.get(re.findall(r'href="(/console/users/[^"]+)"', answer.text)[0]))
    for page in shown:
        assert page.status_code == 200
        assert "<script>" not in page.text
        # Hidden fields have the name as it is.
        assert "\u202e" not in re.sub('value="[^"]*"', "", page.text)
        assert '<script>alert("x")</script>' in text(page)


def forms_of(owner: str, forms: str) -> Iterator[tuple[str, dict[str, str]]]:
    yield "/console/users", {"owner": owner, "name": "stolen", "role": "admin"}
    yield f"{forms}/rotate", {"hours": "0"}
    yield f"{forms}/revoke", {"confirmed": "yes"}
    yield f"{page_of(owner)}/disable", {}
    yield f"{page_of(owner)}/enable", {}


def test_pages_and_forms_are_for_admins_only(server: Server, browser: Browser, owner: str) -> None:
    key, forms = new_key(browser, owner)
    own, stranger = (Browser(server).log_in(each) for each in (key, server.new_key("stranger")))
    reader = read_only_browser(server)

    assert 'href="/console/users"' in browser.get("/console/runs").text
    for other in (own, stranger, reader):
        assert "/console/users" not in other.get("/console/runs").text
        assert "/console/users" not in other.get("/console/account").text
        for path in ("/console/users", page_of(owner), "/console/users/nobody"):
            answer = other.get(path)
            assert (answer.status_code, "only admins" in answer.text) == (403, True), path
        for path, fields in forms_of(owner, forms):
            assert other.submit(path, **fields).status_code == 403, path
    assert Browser(server).get("/console/users").status_code == 401
    assert use(server, key) == 200


def test_a_form_of_another_site_changes_nothing(
    server: Server, browser: Browser, owner: str
) -> None:
    key, forms = new_key(browser, owner)
    foreign = Browser(server).log_in().form_token()

    for path, fields in forms_of(owner, forms):
        for forged in ({}, {"form_token": "0" * 64}, {"form_token": foreign}):
            answer = browser.send(path, {**fields, **forged})
            assert (answer.status_code, "stolen" in answer.text) == (403, False), path
    assert use(server, key) == 200
    assert "stolen" not in browser.get(page_of(owner)).text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"owner": ""}, "owner: "),
        ({"owner": "group:research"}, "owner 'group:research'"),
        ({"name": "a\0b"}, "name: "),
        ({"name": "x" * 5000}, "name: "),
        ({"role": "root"}, "role: "),
        ({"days": "0"}, "days: "),
        ({"days": "x"}, "days: "),
    ],
)
def test_fields_of_a_new_key_that_are_wrong_are_named(
    browser: Browser, owner: str, fields: dict[str, str], named: str
) -> None:
    sent = {"owner": owner, "name": "k", "role": "user", **fields}

    answer: httpx.Response = browser.submit("/console/users", **sent)

    assert (answer.status_code, named in text(answer)) == (400, True), text(answer)


def test_lists_have_pages_and_no_number_makes_them_fail(browser: Browser, owner: str) -> None:
    for number in range(2):
        new_key(browser, f"{owner}-{number}")

    assert "2 users by name; page 1 of 1" in browser.get(f"/console/users?search={owner}").text
    for path in ("/console/users?search=nobody-here", "/console/users?page=1000000"):
        assert browser.get(path).status_code == 200
    assert browser.get(f"{page_of(f'{owner}-0')}?page=9").status_code == 200
    for wrong in ("page=0", "page=x", "page=1000001", f"search={'x' * 257}"):
        assert browser.get(f"/console/users?{wrong}").status_code == 400, wrong
    assert browser.get("/console/users/nobody-here").status_code == 404


def test_a_project_leads_admins_to_its_members_and_names_its_groups(
    server: Server, browser: Browser, owner: str
) -> None:
    key, _ = new_key(browser, owner)
    project = server.new_project("of-a-group", key)
    own = Browser(server).log_in(key)
    page = f"/console/projects/{project}"
    own.submit(f"{page}/members", owner="group:research", role="viewer")

    assert f'<a href="{page_of(owner)}">' in browser.get(page).text
    assert "/console/users/" not in own.get(page).text
    for each in (browser, own):
        assert "group:research <small>" in each.get(page).text
    assert f'<a href="{page}">' in browser.get(page_of(owner)).text
