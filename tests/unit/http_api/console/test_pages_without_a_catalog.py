"""Pages while the catalog is away: they say so, and come back by themselves, without scripts."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_testing.clients.console_browser import FORM_TOKEN
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served
from tinkercloud_testing.storage.postgresql import PostgreSQL, a_postgresql

KEY = "tml-of-somebody-whose-catalog-is-away"
PAGES = ("runs", "sessions", "problems", "usage", "projects", "users", "account")


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    with a_postgresql() as running:
        yield running


async def test_pages_are_loaded_again_until_the_catalog_is_back(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    database = SecretStr(postgresql.new_database())
    settings = Settings(state_dir=tmp_path, bootstrap_key=KEY, database_url=database)
    async with (
        served(Application(settings, OneHead())) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as browser,
    ):
        assert (await browser.post("/console/login", data={"key": KEY})).status_code == 303
        account = await browser.get("/console/account")
        form = {"form_token": FORM_TOKEN.findall(account.text)[0]}

        postgresql.stop()
        try:
            away = {name: await browser.get(f"/console/{name}") for name in PAGES}
            logged_out = await browser.post("/console/logout", data=form)
        finally:
            postgresql.start()
        back = {name: await browser.get(f"/console/{name}") for name in PAGES}

    for name, page in away.items():
        assert (page.status_code, page.headers.get("refresh")) == (503, "5"), name
        assert "the catalog does not respond" in page.text
        assert "loaded again every 5 seconds" in page.text
    # A browser would open the address of the form, which is no page.
    assert (logged_out.status_code, logged_out.headers.get("refresh")) == (503, None)
    assert "send the form again" in logged_out.text
    # The session is still there: no cookie was forgotten.
    assert {name: page.status_code for name, page in back.items()} == dict.fromkeys(PAGES, 200)
    assert all("refresh" not in page.headers for page in back.values())
