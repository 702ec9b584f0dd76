"""A server with runs in several states, and browsers that look at its console."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, StorageState, expect

from tinkercloud_testing.clients.browsers import Observed, Open, a_chromium
from tinkercloud_testing.clients.console_runs import MODEL, SETTINGS, Runs, make_runs
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

expect.set_options(timeout=PATIENCE_SECONDS * 1000)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with a_chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def server(
    chromium: Browser, tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> Iterator[Server]:
    state_dir = tmp_path_factory.mktemp("state")
    with a_server(state_dir, {MODEL: model_folder}, SETTINGS) as running:
        yield running


@pytest.fixture(scope="session")
def runs(server: Server) -> Runs:
    return make_runs(server)


@pytest.fixture
def observed() -> Observed:
    """What the windows of this test have done."""
    return Observed()


@pytest.fixture
def anonymous(chromium: Browser, server: Server, observed: Observed) -> Iterator[Open]:
    """Open windows of browsers that are not logged in; settings are those of a context."""
    opened = []

    def open_window(**settings: Any) -> Page:
        context = chromium.new_context(**{"base_url": server.url, **settings})
        context.set_default_timeout(PATIENCE_SECONDS * 1000)
        opened.append(context)
        observed.watch(context)
        return context.new_page()

    yield open_window
    for context in opened:
        context.close()


@pytest.fixture(scope="session")
def session(chromium: Browser, server: Server) -> StorageState:
    """Return the cookies of a browser that is logged in."""
    context = chromium.new_context(base_url=server.url)
    page = context.new_page()
    page.goto("/console/login")
    page.get_by_label("API key").fill(API_KEY)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Runs", exact=True).wait_for()
    kept = context.storage_state()
    context.close()
    return kept


@pytest.fixture
def logged_in(anonymous: Open, session: StorageState) -> Open:
    """Open windows of browsers that are logged in."""

    def open_window(**settings: Any) -> Page:
        return anonymous(storage_state=session, **settings)

    return open_window
