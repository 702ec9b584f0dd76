"""A login with an OpenID provider of another site leads a browser into the console."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tinkercloud_testing.clients.browsers import Open
from tinkercloud_testing.clients.console_runs import MODEL
from tinkercloud_testing.clients.openid import Provider, a_provider
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.serving.servers import Server

# The provider uses parts of Authlib that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with a_provider({"1": {"email": "ann@example.com", "email_verified": True}}) as running:
        yield running


@pytest.fixture(scope="module")
def public_url(
    chromium: Browser,
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Path,
    provider: Provider,
) -> Iterator[str]:
    """Run a server whose name is another site than the provider's address 127.0.0.1."""
    folder, port = tmp_path_factory.mktemp("login"), free_port()
    (folder / "secret").write_text("a-secret-of-the-provider")
    url = f"http://localhost:{port}"
    settings = {
        "TINKERCLOUD_PRELOAD": "false",
        "TINKERCLOUD_PUBLIC_URL": url,
        "TINKERCLOUD_OIDC__ISSUER": provider.issuer,
        "TINKERCLOUD_OIDC__CLIENT_ID": "tinkercloud",
        "TINKERCLOUD_OIDC__CLIENT_SECRET_FILE": str(folder / "secret"),
        "TINKERCLOUD_OIDC__ALLOW_ALL_ACCOUNTS": "true",
    }
    server = Server({MODEL: model_folder}, folder / "state", settings, port)
    try:
        server.start()
        yield url
    finally:
        server.stop()
        server.kill_heads()


def test_an_account_of_the_provider_opens_the_console_without_a_key(
    anonymous: Open, provider: Provider, public_url: str
) -> None:
    window = anonymous(base_url=public_url)
    window.goto("/console/usage")
    window.get_by_role("link", name="Log in with").click()
    window.wait_for_url("**/login")
    assert not Axe().run(window).violations_count
    window.get_by_role("button", name="Open the console").click()
    window.get_by_role("button", name="1", exact=True).click()

    expect(window.get_by_role("heading", level=1)).to_have_text("Runs")
    expect(window.get_by_text("ann@example.com (user)")).to_be_visible()
    window.reload()
    expect(window.get_by_text("ann@example.com (user)")).to_be_visible()
