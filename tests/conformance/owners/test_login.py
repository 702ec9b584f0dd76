"""Accounts of an OpenID provider log in with a browser, and get keys of their owners."""

import base64
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey

from tinkercloud_api.access.access_tokens import AccessTokens
from tinkercloud_api.access.auditing import Auditing
from tinkercloud_api.access.auth import Authenticator
from tinkercloud_api.access.browser_sessions import BrowserSessions
from tinkercloud_api.catalog.access.audit_log import AuditLog
from tinkercloud_api.catalog.access.console_tokens import ConsoleTokens
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_api.login.login_pages import application
from tinkercloud_api.login.openid_login import Logins
from tinkercloud_testing.clients.openid import Provider, a_provider, changed
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.serving.servers import Server

# The provider uses parts of Authlib that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CLIENT, SECRET = "tinkercloud", "a-secret-of-the-provider"
KEY = re.compile(r"<code>(tml-[\w-]+)</code>")
USERS: dict[str, dict[str, object]] = {
    "1": {"email": "ann@example.com", "email_verified": True, "groups": ["research"]},
    "2": {"email": "bob@example.com", "email_verified": True, "groups": ["research", "platform"]},
    "3": {"email": "eve@example.com", "email_verified": True, "groups": ["sales"]},
    "4": {"email": "mal@example.com", "email_verified": False, "groups": ["research"]},
    "5": {"email": "taken", "email_verified": True, "groups": ["research"]},
    "6": {"email": "ann@example.com", "email_verified": True, "groups": ["research"]},
    "7": {"email": "kim@example.com", "email_verified": True, "groups": ["research", "vision"]},
}


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with a_provider(USERS) as running:
        # The server must not believe that the provider leaves tokens unsigned.
        offered = ["RS256", "none", "HS256"]
        running.metadata = {"id_token_signing_alg_values_supported": offered}
        yield running


@pytest.fixture(autouse=True)
def honest(provider: Provider) -> None:
    """Undo what the test before has falsified."""
    provider.falsify = lambda _provider, token: token
    provider.is_failing = False


@pytest.fixture(scope="module")
def login_server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, provider: Provider
) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("login"), free_port()
    (folder / "secret").write_text(f"{SECRET}\n")
    settings = {
        "TINKERCLOUD_PRELOAD": "false",
        "TINKERCLOUD_PUBLIC_URL": f"http://127.0.0.1:{port}",
        "TINKERCLOUD_OIDC__ISSUER": provider.issuer,
        "TINKERCLOUD_OIDC__CLIENT_ID": CLIENT,
        "TINKERCLOUD_OIDC__CLIENT_SECRET_FILE": str(folder / "secret"),
        "TINKERCLOUD_OIDC__ALLOWED_GROUPS": '["research"]',
        "TINKERCLOUD_OIDC__ROLES": '{"platform": "admin"}',
    }
    server = Server({"tiny/llama": model_folder}, folder / "state", settings, port)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        server.kill_heads()


class Browser:
    """A browser that follows a login step by step."""

    def __init__(self, server: Server) -> None:
        self.server, self.client = server, httpx.Client()

    def start(self, button: str = "Get an API key") -> str:
        """Click a button, and return the address of the provider's form."""
        page = self.client.get(f"{self.server.url}/login")
        (form,) = [form for form in page.text.split("<form")[1:] if f"<button>{button}" in form]
        target = page.url.join(form.split('action="')[1].split('"')[0])
        answer = self.client.post(target, headers={"Sec-Fetch-Site": "same-origin"})
        assert answer.status_code == 303, answer.text
        return answer.headers["location"]

    def authenticate(self, form: str, subject: str) -> str:
        """Log in at the provider, and return the address to which it sends the browser."""
        answer = self.client.post(form, data={"sub": subject})
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]

    def log_in(self, subject: str) -> httpx.Response:
        return self.client.get(self.authenticate(self.start(), subject))

    def open_console(self, subject: str) -> httpx.Response:
        return self.client.get(self.authenticate(self.start("Open the console"), subject))

    def end_keys(self, subject: str) -> httpx.Response:
        return self.client.get(self.authenticate(self.start("End all keys"), subject))


@pytest.fixture
def browser(login_server: Server) -> Iterator[Browser]:
    browser = Browser(login_server)
    yield browser
    browser.client.close()


def key_in(page: httpx.Response) -> str:
    assert page.status_code == 200, page.text
    found = KEY.search(page.text)
    assert found is not None, page.text
    return found[1]


def whoami(server: Server, key: str) -> dict[str, Any]:
    return server.request("GET", "/api/v1/auth/apikey/me", key=key).json()


def test_a_login_shows_a_key_of_its_owner_once(
    login_server: Server, browser: Browser, provider: Provider
) -> None:
    callback = browser.authenticate(browser.start(), "1")
    page = browser.client.get(callback)
    key = key_in(page)
    again = browser.client.get(callback)

    described = whoami(login_server, key)
    lifetime = datetime.fromisoformat(described["expires_at"]) - datetime.now(UTC)
    assert described["details"]["user_details"]["email"] == "ann@example.com"
    assert timedelta(days=29) < lifetime <= timedelta(days=30)
    assert login_server.rest(key).list_sessions().result().sessions == []
    assert page.headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert again.status_code == 400
    assert KEY.search(again.text) is None
    # The proof belongs to the challenge: a stolen code is useless without the browser's cookie.
    assert provider.proofs[-1] == provider.challenges[-1]
    entries = login_server.request("GET", "/api/v1/audit", key=key).json()["entries"]
    assert entries[-1]["event"] == "key_login"
    named = entries[-1]["event_details"]["objects"]
    assert named == [f"key {described['key_id']}", "group:research"]


def test_a_login_opens_the_console_and_shows_no_key(
    login_server: Server, browser: Browser, provider: Provider
) -> None:
    runs = f"{login_server.url}/console/runs"
    asked = browser.client.get(runs)
    assert asked.status_code == 401
    assert f'<a href="/login">Log in with {urlsplit(provider.issuer).netloc}</a>' in asked.text

    opened = browser.open_console("1")

    assert "tml-" not in opened.text
    assert opened.headers["refresh"] == "0; url=/console"
    cookie = opened.headers["set-cookie"].lower()
    assert {"httponly", "samesite=strict", "path=/console"} <= set(cookie.split(",")[0].split("; "))
    assert "ann@example.com (user)" in browser.client.get(runs).text
    key = key_in(browser.log_in("1"))
    entries = login_server.request("GET", "/api/v1/audit", key=key).json()["entries"]
    assert [entry["event"] for entry in entries[-3:]] == ["key_login", "console_login", "key_login"]


def test_sessions_of_the_console_end_with_the_keys_of_logins_and_their_owner(
    login_server: Server, browser: Browser
) -> None:
    def status() -> int:
        return browser.client.get(f"{login_server.url}/console/runs").status_code

    browser.open_console("1")
    login_server.command("users", "disable", "ann@example.com", "--yes")
    disabled = status()
    login_server.command("users", "enable", "ann@example.com")
    browser.open_console("1")
    opened_again = status()
    browser.end_keys("1")

    assert (disabled, opened_again, status()) == (401, 200, 401)


def test_an_account_that_may_not_log_in_opens_no_console(
    login_server: Server, browser: Browser
) -> None:
    assert browser.open_console("3").status_code == 403
    assert browser.client.get(f"{login_server.url}/console/runs").status_code == 401


def test_groups_decide_who_logs_in_and_with_which_role(
    login_server: Server, browser: Browser
) -> None:
    admin = key_in(browser.log_in("2"))
    everything = login_server.request("GET", "/api/v1/audit", key=admin).json()["entries"]

    assert {entry["event_details"]["owner"] for entry in everything} >= {"bob@example.com"}
    assert browser.log_in("3").status_code == 403
    assert browser.log_in("4").status_code == 403


def test_a_group_is_a_member_of_projects_with_the_accounts_that_logged_in_with_it(
    login_server: Server, browser: Browser, provider: Provider
) -> None:
    owner = login_server.new_key("lead")
    project = login_server.new_project("vision", owner)
    session = {"tags": [], "sdk_version": "0.38.0", "project_id": project}
    path = f"/api/v1/projects/{project}"

    def add(role: str) -> None:
        member = f"{path}/members/group:vision"
        assert login_server.request("PUT", member, {"role": role}, key=owner).status == 200

    def created(key: str) -> int:
        return login_server.post("create_session", session, key=key).status

    key = key_in(browser.log_in("7"))
    before = created(key)
    add("viewer")
    viewed = login_server.request("GET", path, key=key).json()
    as_viewer = created(key)
    add("member")
    as_member = created(key)
    provider.falsify = changed(groups=["research"])
    browser.log_in("7")

    assert (before, as_viewer, as_member) == (404, 403, 200)
    assert viewed["role"] == "viewer"
    assert {"owner": "group:vision", "role": "viewer"} in viewed["members"]
    # The rights of all keys follow the last login.
    assert created(key) == 404


def test_an_account_never_gets_the_name_of_another_owner(
    login_server: Server, browser: Browser
) -> None:
    login_server.command("keys", "create", "taken")
    refused = browser.log_in("5")
    login_server.command("users", "create", "taken")
    linked = browser.log_in("5")
    key_in(browser.log_in("1"))
    impostor = browser.log_in("6")

    assert (refused.status_code, linked.status_code) == (403, 200)
    assert impostor.status_code == 403
    assert "belongs to another account" in impostor.text


def test_a_disabled_account_can_neither_log_in_nor_use_its_keys(
    login_server: Server, browser: Browser
) -> None:
    key = key_in(browser.log_in("1"))
    login_server.command("users", "disable", "ann@example.com", "--yes")
    used = login_server.request("GET", "/api/v1/sessions", key=key).status
    refused = browser.log_in("1")
    login_server.command("users", "enable", "ann@example.com")

    assert (used, refused.status_code) == (401, 403)
    assert browser.log_in("1").status_code == 200


def test_a_logout_ends_all_keys_from_logins_of_the_account_and_no_others(
    login_server: Server, browser: Browser
) -> None:
    made = json.loads(
        login_server.command("keys", "create", "ci", "--owner", "ann@example.com", "--json")
    )
    ended = [key_in(browser.log_in("1")) for _ in range(2)]
    other = key_in(browser.log_in("2"))
    ended.append(login_server.post("auth/token", {}, key=ended[0]).json()["jwt"])

    def statuses(*keys: str) -> list[int]:
        return [login_server.request("GET", "/api/v1/sessions", key=key).status for key in keys]

    before = statuses(*ended)
    page = browser.end_keys("1")

    assert before == [200] * 3
    assert page.status_code == 200, page.text
    assert "ann@example.com" in page.text
    assert KEY.search(page.text) is None
    assert statuses(*ended) == [401] * 3
    assert statuses(other, made["key"]) == [200, 200]
    entries = login_server.request("GET", "/api/v1/audit", key=made["key"]).json()["entries"]
    assert entries[-1]["event"] == "key_logout"
    assert browser.log_in("1").status_code == 200


def test_a_disabled_account_can_still_end_its_keys_and_an_unknown_one_has_none(
    login_server: Server, browser: Browser
) -> None:
    key = key_in(browser.log_in("1"))
    login_server.command("users", "disable", "ann@example.com", "--yes")
    page = browser.end_keys("1")
    login_server.command("users", "enable", "ann@example.com")

    assert page.status_code == 200
    assert login_server.request("GET", "/api/v1/sessions", key=key).status == 401
    assert browser.end_keys("3").status_code == 403


def test_an_answer_to_a_login_is_not_one_to_a_logout(
    login_server: Server, browser: Browser
) -> None:
    key = key_in(browser.log_in("1"))
    callback = browser.authenticate(browser.start(), "1")

    for purpose in ("logout.", "console.", ""):
        page = browser.client.get(callback.replace("state=key.", f"state={purpose}"))
        assert page.status_code == 400
    assert login_server.request("GET", "/api/v1/sessions", key=key).status == 200


def test_a_copy_of_the_cookie_is_worth_nothing_after_the_login(
    login_server: Server, browser: Browser
) -> None:
    callback = browser.authenticate(browser.start(), "1")
    thief = Browser(login_server)
    thief.client.cookies.update(browser.client.cookies)
    key_in(browser.client.get(callback))

    repeated = thief.client.get(callback)
    thief.client.close()

    assert dict(browser.client.cookies) == {}
    assert repeated.status_code == 400
    assert KEY.search(repeated.text) is None


def unsigned(provider: Provider, token: str) -> str:
    parts = ({"alg": "none"}, provider.claims(token))
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    return b".".join([*encoded, b""]).decode()


def shared(provider: Provider, token: str) -> str:
    """Return a token that is signed with the secret that the server and the provider share."""
    return jwt.encode({"alg": "HS256"}, provider.claims(token), OctKey.import_key(SECRET))


def foreign(_provider: Provider, token: str) -> str:
    head, claims, signature = token.split(".")
    return f"{head}.{claims}.{signature[:-8]}AAAAAAAA"


@pytest.mark.parametrize(
    "falsify",
    [
        pytest.param(changed(nonce="another"), id="another nonce"),
        pytest.param(changed(nonce=None), id="no nonce"),
        pytest.param(changed(exp=int(time.time()) - 3600), id="expired"),
        pytest.param(changed(exp=None), id="no expiry"),
        pytest.param(changed(aud="another-client"), id="another audience"),
        pytest.param(changed(aud="another-client", azp=CLIENT), id="another audience, for us"),
        pytest.param(changed(iss="https://another.example.com"), id="another issuer"),
        pytest.param(unsigned, id="unsigned"),
        pytest.param(shared, id="a signature with the shared secret"),
        pytest.param(foreign, id="another signature"),
        pytest.param(lambda _provider, _token: "nonsense", id="no token"),
    ],
)
def test_a_false_id_token_is_refused(
    browser: Browser, provider: Provider, falsify: Callable[[Provider, str], str]
) -> None:
    provider.falsify = falsify

    page = browser.log_in("1")

    assert page.status_code == 400
    assert KEY.search(page.text) is None


def test_a_provider_that_fails_is_named(browser: Browser, provider: Provider) -> None:
    callback = browser.authenticate(browser.start(), "1")
    provider.is_failing = True

    page = browser.client.get(callback)

    assert page.status_code == 503
    assert "the OpenID provider does not respond" in page.text


async def test_a_provider_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    async with login_pages(tmp_path, f"http://127.0.0.1:{free_port()}") as client:
        page = await client.post("/login")

    assert page.status_code == 503
    assert "the OpenID provider does not respond" in page.text


def test_a_callback_without_its_login_is_refused(
    browser: Browser, provider: Provider, login_server: Server
) -> None:
    callback = browser.authenticate(browser.start(), "1")
    used = len(provider.proofs)
    victim = Browser(login_server)
    wrong_state = re.sub(r"state=[^&]+", "state=another", callback)

    # The attacker's callback in the browser of the victim, and one with another state.
    refused = [victim.client.get(callback).status_code, browser.client.get(wrong_state).status_code]
    denied = browser.client.get(f"{login_server.url}/login/callback?error=access_denied")

    assert refused == [400, 400]
    assert denied.status_code == 400
    assert len(provider.proofs) == used
    victim.client.close()


def test_a_code_is_used_once(browser: Browser, login_server: Server) -> None:
    callback = browser.authenticate(browser.start(), "1")
    key_in(browser.client.get(callback))
    replayed = re.search(r"code=([^&]+)", callback)
    assert replayed is not None
    browser.start()
    state = _state_of(browser)

    page = browser.client.get(f"{login_server.url}/login/callback?code={replayed[1]}&state={state}")

    assert page.status_code == 400


def _state_of(browser: Browser) -> str:
    content = next(iter(browser.client.cookies.jar)).value
    assert content is not None
    session = json.loads(base64.b64decode(content.split(".")[0]))
    return str(next(iter(session))).removeprefix("_state_provider_")


def test_another_site_can_start_neither_a_login_nor_a_logout(login_server: Server) -> None:
    url, cross = f"{login_server.url}/login", {"Sec-Fetch-Site": "cross-site"}

    assert httpx.post(url, headers=cross).status_code == 403
    for path in ("logout", "console"):
        assert httpx.post(f"{url}/{path}", headers=cross).status_code == 403
        # A browser that does not say where a request comes from could have been sent by any site.
        assert httpx.post(f"{url}/{path}").status_code == 403
        own = {"Origin": login_server.url}
        assert httpx.post(f"{url}/{path}", headers=own).status_code == 303
    # Otherwise browsers would send `Origin: null`, like a site that hides where it is.
    assert httpx.get(url).headers["referrer-policy"] == "same-origin"
    for forged in ("null", "", "http://evil.example", f"{login_server.url}.evil.example"):
        for path in ("", "/logout", "/console"):
            headers = {"Origin": forged, "Sec-Fetch-Site": "same-origin"}
            assert httpx.post(f"{url}{path}", headers=headers).status_code == 403, forged
    cookie = httpx.post(url).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie


async def test_over_https_the_cookie_is_secure_and_of_this_host_only(
    provider: Provider, tmp_path: Path
) -> None:
    async with login_pages(tmp_path, provider.issuer) as client:
        started = await client.post("/login/console", headers={"Sec-Fetch-Site": "same-origin"})
        callback = httpx.post(started.headers["location"], data={"sub": "1"}).headers["location"]
        finished = await client.get(callback)

    of_console = finished.headers["set-cookie"].lower()
    assert of_console.startswith("tinkercloud-console=")
    assert {"secure", "httponly", "samesite=strict"} <= set(of_console.split("; "))
    cookie = started.headers["set-cookie"].lower()
    assert cookie.startswith("__host-tinkercloud-login=")
    assert {"secure", "httponly", "samesite=lax", "path=/"} <= set(cookie.split("; "))
    assert started.headers["location"].startswith(f"{provider.issuer}/oauth2/authorize?")


@contextlib.asynccontextmanager
async def login_pages(folder: Path, issuer: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run the pages of a server with an https address, and yield a browser."""
    (folder / "secret").write_text(SECRET)
    settings = OidcSettings(
        issuer=issuer,
        client_id=CLIENT,
        client_secret_file=folder / "secret",
        allow_all_accounts=True,
    )
    url, engine = "https://tinker.example.com", open_database(f"sqlite+aiosqlite:///{folder}/c")
    await migrate(engine)
    catalog, auditing = Catalog(engine), Auditing(AuditLog(engine), 1)
    authenticator = Authenticator(catalog, lambda _key: None, AccessTokens(SECRET))
    browsers = BrowserSessions(ConsoleTokens(engine), authenticator)
    pages = application(Logins(settings, url, catalog), auditing, browsers, "a secret", url)
    transport = httpx.ASGITransport(app=pages)
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        yield client
    await engine.dispose()
