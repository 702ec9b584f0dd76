"""The console in a browser without scripts: links, sessions, and what pages show to whom."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode

import pytest
import tinker
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_testing.clients.console_browser import (
    SCRIPT,
    Browser,
    events,
    link,
    read_only_browser,
    text,
)
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.servers import API_KEY, Server

MODEL = "tiny/llama"


@pytest.fixture
def browser(server: Server) -> Browser:
    return Browser(server).log_in()


@pytest.fixture(scope="module")
def training(server: Server) -> tinker.TrainingClient:
    """Return a run that has taken three steps and whose name is an attack."""
    client = tinker.ServiceClient(
        base_url=server.url, api_key=API_KEY, user_metadata={"a": SCRIPT}, display_name=SCRIPT
    )
    training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    for _ in range(3):
        step(training)
    return training


def test_without_a_session_every_page_asks_for_a_key(server: Server) -> None:
    for path in ("/console/runs", "/console/runs/x:train:0", "/console/usage"):
        answer = Browser(server).get(path)

        assert (answer.status_code, "API key" in text(answer)) == (401, True)
        assert "log in to see this page" in text(answer)


def test_a_link_opens_one_session_and_a_wrong_one_none(server: Server) -> None:
    token = link(server).partition("link=")[2]
    first, second = Browser(server), Browser(server)

    answer = first.send("/console/login", {"link": token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/runs")
    cookie = answer.headers["set-cookie"].lower()
    assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/console"))
    assert first.get("/console/runs").status_code == 200
    for wrong in (token, "", "x" * 100_000, SCRIPT):
        answer = second.send("/console/login", {"link": wrong})
        assert answer.status_code == 401
        assert SCRIPT not in answer.text
    assert not second.http.cookies


def test_another_site_logs_no_browser_in(server: Server) -> None:
    browser = Browser(server)
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 303)):
        browser.http.headers["sec-fetch-site"] = site
        assert browser.send("/console/login", {"key": API_KEY}).status_code == status
    del browser.http.headers["sec-fetch-site"]
    forged = ("null", "http://evil.example", f"{server.url}.evil.example", f"http://x@{server.url}")
    for origin, status in (*((each, 403) for each in forged), (server.url, 303)):
        browser.http.headers["origin"] = origin
        assert browser.send("/console/login", {"key": API_KEY}).status_code == status
    # Chromium sends `Origin: null` for forms of a page with the policy no-referrer.
    assert browser.get("/console/login").headers["referrer-policy"] == "same-origin"


def test_a_link_can_lead_to_a_run_and_nowhere_else(server: Server) -> None:
    browser = Browser(server)
    for run, place in (("a:train:0", "a:train:0"), ("//evil.example/x", "%2F%2Fevil.example%2Fx")):
        token = link(server).partition("link=")[2]
        answer = browser.send("/console/login", {"link": token, "run": run})
        assert answer.headers["location"] == f"/console/runs/{place}"


def test_a_key_opens_a_session_and_an_unknown_one_none(server: Server) -> None:
    browser = Browser(server)

    assert browser.send("/console/login", {"key": "tml-unknown"}).status_code == 401
    assert not browser.http.cookies
    assert browser.send("/console/login", {"key": f" {API_KEY} "}).status_code == 303
    assert browser.get("/console/runs").status_code == 200


@pytest.mark.usefixtures("training")
def test_the_curve_of_a_run_is_drawn_without_scripts(
    browser: Browser, server: Server, training: tinker.TrainingClient
) -> None:
    path = f"/console/runs/{training.model_id}"
    wait_until(lambda: 'class="mean ' in browser.get(path).text, "a curve on the page")
    wait_until(lambda: ">3</text>" in browser.get(path).text, "the third step")

    page = browser.get(path).text

    points = server.request("GET", f"/api/v1/runs/{training.model_id}/curve").json()["points"]
    means = [f"{point['metrics']['loss']['mean']:.5g}" for point in points]
    assert all(f'<td class="number">{mean}</td>' in page for mean in means)
    assert "loss by step; " in page
    scripts = re.findall("<script[^>]*>[^<]*", page)
    assert all(each.startswith('<script src="/console/static/') for each in scripts)
    assert all(each.endswith(" defer>") for each in scripts)
    assert "default-src 'self'" in browser.get(path).headers["content-security-policy"]
    assert browser.get(f"{path}?follow=5").headers["refresh"] == "5"
    assert browser.get(f"{path}?follow=1").status_code == 400


def test_a_page_shows_the_steps_that_it_is_asked_for(
    browser: Browser, training: tinker.TrainingClient
) -> None:
    path = f"/console/runs/{training.model_id}"
    wait_until(lambda: ">3</text>" in browser.get(path).text, "the third step")

    def rows(query: str) -> list[str]:
        return re.findall(r'<th scope="row" class="number">(\d+)</th>', browser.get(query).text)

    assert rows(path) == ["1", "2", "3"]
    assert rows(f"{path}?from=2") == ["2", "3"]
    assert rows(f"{path}?to=2&follow=5") == ["1", "2"]
    followed = text(browser.get(f"{path}?from=2&to=3&follow=5"))
    assert '<a href="?from=2&to=2&follow=5">First half</a>' in followed
    assert '<a href="?from=2&to=3">Stop</a>' in followed
    assert ">3</text>" not in browser.get(f"{path}?from=1&to=2").text
    assert "The run has no point in these steps" in browser.get(f"{path}?from=9").text
    for query, words in (
        ("from=3&to=2", "to: got 2, must be at least 3"),
        ("from=-1", "from: "),
        ("to=x", "to: "),
        (f"to={10**30}", "to: "),
    ):
        refused = browser.get(f"{path}?{query}")
        assert (refused.status_code, words in text(refused)) == (400, True), query


def test_names_that_are_attacks_are_shown_as_text(
    browser: Browser, training: tinker.TrainingClient
) -> None:
    for path in ("/console/runs", f"/console/runs/{training.model_id}"):
        page = browser.get(path)

        assert "<script>" not in page.text
        assert '<script>alert("x")</script>\ufffd\ufffd' in text(page)


def test_the_runs_and_the_usage_of_others_do_not_exist(
    server: Server, training: tinker.TrainingClient
) -> None:
    stranger = Browser(server).log_in(server.new_key("stranger"))

    answer = stranger.get(f"/console/runs/{training.model_id}")
    assert (answer.status_code, "does not exist, or belongs to another owner" in text(answer)) == (
        404,
        True,
    )
    assert training.model_id not in text(stranger.get("/console/runs"))
    assert "Nothing was used in this month" in text(stranger.get("/console/usage"))
    assert "bootstrap" not in text(stranger.get("/console/usage"))


def test_runs_are_found_by_what_they_contain(
    server: Server, browser: Browser, training: tinker.TrainingClient
) -> None:
    for words in ("ALERT(", training.model_id[:8], "tiny/LLAMA", "bootstrap"):
        query = urlencode({"search": words})
        assert training.model_id in text(browser.get(f"/console/runs?{query}"))
        listed = server.request("GET", f"/api/v1/runs?{query}").json()["runs"]
        assert training.model_id in [run["run_id"] for run in listed]
    assert training.model_id in text(browser.get("/console/runs?status=open"))
    assert training.model_id not in text(browser.get("/console/runs?status=ended"))
    for words in ("%", "_", SCRIPT * 2, "no such run"):
        found = text(browser.get(f"/console/runs?{urlencode({'search': words})}"))
        assert training.model_id not in found
    found = text(browser.get("/console/runs?search=no+such+run"))
    assert "No run that you may see has these words" in found
    stranger = Browser(server).log_in(server.new_key("stranger"))
    theirs = stranger.get(f"/console/runs?{urlencode({'search': training.model_id})}")
    assert f"/console/runs/{training.model_id}" not in theirs.text


def test_the_metadata_by_which_a_run_is_found_is_shown(server: Server, browser: Browser) -> None:
    client = tinker.ServiceClient(
        base_url=server.url, api_key=API_KEY, user_metadata={"team": "vision", "a": SCRIPT}
    )
    made = client.create_lora_training_client(MODEL, rank=4, user_metadata={"sweep": "7 of 9"})
    run = made.result().model_id

    details = server.request("GET", f"/api/v1/runs/{run}").json()
    page = browser.get(f"/console/runs/{run}")
    shown = server.command("runs", "show", run, "--base-url", server.url, "--api-key", API_KEY)

    assert details["session_metadata"] == {"team": "vision", "a": SCRIPT}
    assert details["user_metadata"] == {"sweep": "7 of 9"}
    assert "<script>" not in page.text
    for name, value in (("team", "vision"), ("sweep", "7 of 9")):
        assert f"<li>{name}: {value}</li>" in page.text
        assert f"metadata {name}: {value}\n" in shown
        assert run in text(browser.get(f"/console/runs?{urlencode({'search': value})}"))


def test_a_form_of_another_session_ends_no_session(server: Server, browser: Browser) -> None:
    other = Browser(server).log_in()
    for token in ({}, {"form_token": other.form_token()}, {"form_token": "0" * 64}):
        assert browser.send("/console/logout", token).status_code == 403

    assert browser.get("/console/runs").status_code == 200
    assert browser.send("/console/logout", {"form_token": browser.form_token()}).status_code == 303
    assert browser.get("/console/runs").status_code == 401
    assert other.get("/console/runs").status_code == 200


def test_every_form_needs_the_token_of_the_session(browser: Browser, tmp_path: Path) -> None:
    table = Application(Settings(state_dir=tmp_path), OneHead()).route_table
    places = {each.path for each in table if each.method == "POST" and "/console/" in each.path}

    for place in places - {"/console/login"}:
        path = re.sub(r"\{[a-z_:]+\}", "x", place)
        answer = browser.send(path, {"confirmed": "yes"})
        assert (answer.status_code, "not of your session" in text(answer)) == (403, True), path


def test_sessions_end_everywhere_at_once_and_with_their_key(server: Server) -> None:
    key = server.new_key("wanderer")
    first, second = Browser(server).log_in(key), Browser(server).log_in(key)
    everywhere = {"form_token": first.form_token(), "everywhere": "yes"}
    assert first.send("/console/logout", everywhere).status_code == 303
    assert second.get("/console/runs").status_code == 401

    third = Browser(server).log_in(key)
    server.request("DELETE", "/api/v1/auth/apikey/me", key=key)
    answer = third.get("/console/runs")
    assert (answer.status_code, "the API key of this session has ended" in text(answer)) == (
        401,
        True,
    )


def test_a_session_that_was_changed_is_none(browser: Browser) -> None:
    browser.http.cookies = {name: f"{value}x" for name, value in browser.http.cookies.items()}
    assert browser.get("/console/runs").status_code == 401


def test_a_run_is_saved_suspended_and_ended_with_forms(server: Server, browser: Browser) -> None:
    began = datetime.now(UTC)
    training = server.client().create_lora_training_client(MODEL, rank=4).result()
    step(training)
    page = f"/console/runs/{training.model_id}"
    form = {"form_token": browser.form_token()}

    assert browser.send(f"{page}/save", {}).status_code == 403
    assert browser.send(f"{page}/save", form).headers["location"] == page
    assert "saved-step-000001" in text(browser.get(page))
    assert browser.send(f"{page}/stop", {**form, "suspend": "yes"}).status_code == 303
    assert "suspended" in text(browser.get(page))
    assert browser.send(f"{page}/stop", form).status_code == 303
    assert "its owner stopped it" in text(browser.get(page))
    assert "Save it and end it" not in text(browser.get(page))
    done = events(server, began, training.model_id)
    assert (done.count("run_stop"), done.count("checkpoint_write")) == (2, 2)


def test_a_browser_with_a_read_only_key_changes_nothing(
    server: Server, training: tinker.TrainingClient
) -> None:
    browser = read_only_browser(server)

    answer = browser.submit(f"/console/runs/{training.model_id}/stop")

    assert (answer.status_code, "is read-only" in text(answer)) == (403, True)
    assert "<h1>" in answer.text
    assert "Save a checkpoint" not in browser.get(f"/console/runs/{training.model_id}").text


def test_a_stranger_changes_no_run(server: Server, training: tinker.TrainingClient) -> None:
    stranger = Browser(server).log_in(server.new_key("stranger"))
    form = {"form_token": stranger.form_token()}

    for action in ("save", "stop"):
        path = f"/console/runs/{training.model_id}/{action}"
        assert stranger.send(path, form).status_code == 404


def test_runs_are_compared_and_those_of_others_are_not(
    server: Server, browser: Browser, training: tinker.TrainingClient
) -> None:
    other = server.client().create_lora_training_client(MODEL, rank=4).result()
    step(other)
    path = f"/console/compare?run={training.model_id}&run={other.model_id}"
    wait_until(lambda: browser.get(path).text.count('class="mean colour-1') > 0, "two curves")

    assert 'class="mean colour-0' in browser.get(path).text
    stranger = Browser(server).log_in(server.new_key("stranger"))
    assert stranger.get(path).status_code == 404
    assert "tick up to" in browser.get("/console/compare").text
    assert browser.get(f"/console/compare?{'&'.join(['run=x:train:0'] * 9)}").status_code == 400


def test_what_clients_logged_is_compared_as_charts_and_tables(
    server: Server, browser: Browser
) -> None:
    first, second, empty = (
        server.client().create_lora_training_client(MODEL, rank=4).result().model_id for _ in "abc"
    )
    for run, reward in ((first, 0.25), (second, 0.75)):
        body = {"step": 3, "metrics": {"reward": reward, SCRIPT[:40]: 1.0}}
        assert server.post(f"runs/{run}/metrics", body).status == 200

    page = browser.get("/console/compare?" + urlencode({"run": [first, second, empty]}, doseq=True))

    assert "<script>" not in page.text
    assert all(f'class="mean colour-{number}' in page.text for number in (0, 1))
    cells = "".join(f'<td class="number">{value}</td>' for value in ("0.25", "0.75", ""))
    assert f'<tr><th scope="row" class="number">3</th>{cells}</tr>' in page.text
    command = ["--base-url", server.url, "--api-key", API_KEY]
    shown = server.command("runs", "compare", first, second, empty, "--metric", "reward", *command)
    assert shown.splitlines()[-1].split() == ["3", "0.25", "0.75"]
    wrong = server.command("runs", "compare", first, "--metric", "nothing", *command)
    assert "has nothing; choose --metric from: " in wrong
    assert "reward" in wrong
    alone = text(browser.get(f"/console/compare?run={empty}"))
    assert "None of these runs has reported an optimizer step" in alone
    assert f"GET /api/v1/runs/{empty}/curve" in alone


def test_problems_are_named_with_what_to_do(server: Server, browser: Browser) -> None:
    command = ["problems", "--base-url", server.url, "--api-key", API_KEY, "--json"]
    found = server.request("GET", "/api/v1/problems").json()["problems"]

    printed = json.loads(CliRunner().invoke(app, command).stdout)
    assert [each["subject"] for each in printed] == [each["subject"] for each in found]
    page = text(browser.get("/console/problems"))
    assert all(each["remedy"] in page for each in found)
    times = [each["since"] for each in found]
    assert times == sorted(times, reverse=True)


def test_sessions_are_listed_with_their_runs_as_the_command_lists_them(
    server: Server, browser: Browser, training: tinker.TrainingClient
) -> None:
    session = training.holder.get_session_id()
    listed = ["sessions", "list", "--all", "--search", session, "--status", "live", "--json"]
    answer = CliRunner().invoke(app, [*listed, "--base-url", server.url, "--api-key", API_KEY])
    (printed,) = json.loads(answer.stdout)

    page = browser.get(f"/console/sessions?search={session}")

    assert [each["model_id"] for each in printed["models"]] == [training.model_id]
    assert f'<a href="/console/runs/{training.model_id}">' in page.text
    assert f"tinkercloud sessions list --all --search {session}" in page.text
    assert "<script>" not in page.text
    assert '<script>alert("x")</script>\ufffd\ufffd' in text(page)
    stranger = Browser(server).log_in(server.new_key("stranger"))
    assert session not in text(stranger.get("/console/sessions"))


def test_what_a_client_logs_is_on_the_page_of_its_run(
    server: Server, browser: Browser, training: tinker.TrainingClient
) -> None:
    path = f"runs/{training.model_id}/metrics"
    for number in range(3):
        body = {"step": number, "metrics": {f"reward {SCRIPT}"[:40]: number / 2}}
        assert server.post(path, body).status == 200
    for wrong in (
        {"step": -1, "metrics": {"a": 1}},
        {"step": 1, "metrics": {}},
        {"step": 1, "metrics": {"a": "x"}},
        {"step": 1, "metrics": {"a" * 65: 1}},
        {"step": 1, "metrics": {"a\0": 1}},
        b'{"step": 1, "metrics": {"a": NaN}}',
    ):
        assert server.post(path, wrong).status == 400, wrong
    stranger = server.new_key("stranger")
    assert server.post(path, {"step": 1, "metrics": {"a": 1}}, key=stranger).status == 404

    page = browser.get(f"/console/runs/{training.model_id}")

    assert "<script>" not in page.text
    assert 'reward <script>alert("x")</script>' in text(page)
    assert text(page).count("0 at first, 1 at last") == 1
    row = '<tr><th scope="row" class="number">1</th><td class="number">0.5</td></tr>'
    assert page.text.partition('aria-label="Logged values"')[2].count(row) == 1


def test_forms_with_too_many_fields_are_refused(server: Server) -> None:
    answer = Browser(server).http.post("/console/login", content="a=1&" * 30)

    assert (answer.status_code, "more than 20 fields" in text(answer)) == (400, True)


def test_logins_and_logouts_are_in_the_audit_log(server: Server) -> None:
    began, key = datetime.now(UTC), server.new_key("audited")
    browser = Browser(server).log_in(key)
    browser.send("/console/logout", {"form_token": browser.form_token(), "everywhere": "yes"})

    assert events(server, began, "audited", key) == [
        "console_open",
        "console_login",
        "console_logout",
    ]
    shown = server.command("audit", "--api-key", key, "--base-url", server.url)
    assert re.search(r" console_login +303 +/console/login$", shown, re.MULTILINE)


def test_an_address_that_guesses_has_to_wait_but_not_those_who_are_logged_in(
    server: Server, browser: Browser
) -> None:
    guessing = Browser(server)
    guessing.http.headers["x-forwarded-for"] = "10.1.2.3"
    answers = {guessing.send("/console/login", {"key": f"tml-{n}"}).status_code for n in range(40)}

    assert answers == {401, 429}
    guessing.http.cookies = browser.http.cookies
    assert guessing.get("/console/runs").status_code == 200
