"""Sessions of browsers end with what opened them."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from tinkercloud_api.access.access_tokens import AccessTokens
from tinkercloud_api.access.auth import Authenticator, hash_key
from tinkercloud_api.access.browser_sessions import BrowserSessions
from tinkercloud_api.catalog.access.console_tokens import ConsoleTokens
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.wire.errors import Unauthenticated

KEY = "tml-key"


@pytest.fixture
async def browsers(database_url: str) -> AsyncIterator[BrowserSessions]:
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.add_key(key_hash=hash_key(KEY), name="a", owner="me", role="user")
    authenticator = Authenticator(catalog, lambda _: None, AccessTokens("s" * 32))
    yield BrowserSessions(ConsoleTokens(engine), authenticator)
    await catalog.close()


async def test_a_session_ends_with_the_token_that_asked_for_its_link(
    browsers: BrowserSessions,
) -> None:
    authenticator, moment = browsers.authenticator, now()
    token = authenticator.token(await authenticator.principal(KEY))
    link = await browsers.link(await authenticator.principal(token), moment)

    session = await browsers.open(await browsers.with_link(link, "", moment), moment)

    assert (await browsers.find(session.token, "", moment)).caller.owner == "me"
    with pytest.raises(Unauthenticated):
        await browsers.find(session.token, "", moment + timedelta(hours=2))


async def test_a_session_of_a_key_lasts_a_week_and_a_link_ten_minutes(
    browsers: BrowserSessions,
) -> None:
    moment = now()
    session = await browsers.open(await browsers.with_key(KEY, ""), moment)
    link = await browsers.link(session.caller, moment)

    found = await browsers.find(session.token, "", moment + timedelta(days=6))
    assert found.caller == session.caller
    for token, later in ((session.token, timedelta(days=8)), (link, timedelta(0))):
        with pytest.raises(Unauthenticated):
            await browsers.find(token, "", moment + later)
    with pytest.raises(Unauthenticated):
        await browsers.with_link(link, "", moment + timedelta(minutes=11))
