"""Sessions of browsers end with what opened them."""

from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta

import pytest

from tinkercloud_api.access.access_tokens import AccessTokens
from tinkercloud_api.access.auth import Authenticator, hash_key
from tinkercloud_api.access.browser_sessions import BrowserSessions, is_of_this_site
from tinkercloud_api.catalog.access.console_tokens import ConsoleTokens
from tinkercloud_api.catalog.access.user_rows import LoginKey
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.wire.errors import Unauthenticated

KEY, UNSEEN, OTHER = "tml-key", "tml-unseen", "tml-other"
KEYS = {KEY: "a", UNSEEN: LoginKey.CONSOLE, OTHER: LoginKey.CONSOLE}


@pytest.fixture
async def browsers(database_url: str) -> AsyncIterator[BrowserSessions]:
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    for key, name in KEYS.items():
        await catalog.add_key(key_hash=hash_key(key), name=name, owner="me", role="user")
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


async def test_a_logout_ends_the_key_that_nobody_saw_and_no_other(
    browsers: BrowserSessions,
) -> None:
    async def valid() -> list[str]:
        held = []
        for key in KEYS:
            with suppress(Unauthenticated):
                await browsers.authenticator.principal(key)
                held.append(key)
        return held

    sessions = [await browsers.open(await browsers.with_key(key, ""), now()) for key in KEYS]

    await browsers.end(sessions[0], everywhere=False)
    after_own_key = await valid()
    await browsers.end(sessions[1], everywhere=False)
    after_login = await valid()
    await browsers.end(sessions[2], everywhere=True)

    assert (after_own_key, after_login) == ([KEY, UNSEEN, OTHER], [KEY, OTHER])
    assert await valid() == [KEY]


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({}, None),
        ({"origin": "https://here.example"}, True),
        ({"origin": "https://public.example"}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "https://here.example"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "https://evil.example"}, False),
        *(
            ({"origin": forged}, False)
            for forged in (
                "null",
                "",
                "here.example",
                "https://here.example.evil.example",
                "https://here.example:81",
                "https://evil.example/https://here.example",
                "https://here.example@evil.example",
                "http://[",
                "x" * 100_000,
            )
        ),
    ],
)
def test_a_form_is_of_this_site_if_all_that_browsers_say_does(
    headers: dict[str, str], is_own: bool | None
) -> None:
    sent = {"host": "here.example", **headers}

    assert is_of_this_site(sent, "https://public.example") is is_own
    # Without a host, no site is this one.
    assert not is_of_this_site({"origin": "https://"}, None)
