"""Who an account is, from the claims of its ID token; and settings that would be unsafe."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from authlib.integrations.starlette_client import OAuth
from joserfc import jwt
from joserfc.errors import BadSignatureError
from joserfc.jwk import RSAKey
from pydantic import ValidationError

from tinkercloud_api.access.roles import Role
from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.login import openid_login
from tinkercloud_api.login.openid_login import ProviderClient, identify
from tinkercloud_protocol.wire.errors import Forbidden
from tinkercloud_testing.clients.openid import a_provider

SETTINGS: dict[str, Any] = {
    "issuer": "https://id.example.com",
    "client_id": "tinkercloud",
    "client_secret_file": Path("secret"),
    "allowed_groups": ["research", "platform"],
    "roles": {"platform": "admin", "guests": "read-only"},
}
CLAIMS = {"sub": "1", "email": "ann@example.com", "email_verified": True, "groups": ["research"]}


@pytest.mark.parametrize(
    ("groups", "role"),
    [
        (["research"], Role.USER),
        ("research", Role.USER),
        (["research", "platform", "guests"], Role.ADMIN),
        (["research", "guests"], Role.READ_ONLY),
        (["research", 5, None, {}], Role.USER),
    ],
)
def test_the_group_with_most_rights_counts(groups: object, role: Role) -> None:
    found = identify({**CLAIMS, "groups": groups}, OidcSettings(**SETTINGS))

    assert (found.name, found.role) == ("ann@example.com", role)
    assert found.subject == "https://id.example.com|1"


def test_groups_whose_names_cannot_be_stored_are_members_of_nothing() -> None:
    named = ["research", "a\0b", "x" * 300, ""]
    found = identify({**CLAIMS, "groups": named}, OidcSettings(**SETTINGS))

    assert found.groups == {"research"}


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"groups": ["sales"]}, "none of the groups"),
        ({"groups": None}, "none of the groups"),
        ({"groups": 5}, "none of the groups"),
        ({"groups": {"research": True}}, "none of the groups"),
        ({"email": None}, "no usable claim 'email'"),
        ({"email": ["ann@example.com"]}, "no usable claim 'email'"),
        ({"email": "a\0b"}, "no usable claim 'email'"),
        ({"email": "x" * 300}, "no usable claim 'email'"),
        ({"email_verified": False}, "has not verified"),
        ({"email_verified": "true"}, "has not verified"),
    ],
)
def test_an_account_that_is_not_certainly_allowed_is_refused(
    claims: dict[str, object], message: str
) -> None:
    with pytest.raises(Forbidden, match=message):
        identify({**CLAIMS, **claims}, OidcSettings(**SETTINGS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"issuer": "http://id.example.com"}, "must begin with https"),
        ({"allowed_groups": []}, "allow_all_accounts"),
        ({"scopes": "email"}, "must contain 'openid'"),
        ({"client": "x"}, "client"),
    ],
)
def test_unsafe_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OidcSettings(**{**SETTINGS, **changes})


@pytest.mark.parametrize("public_url", [None, "http://tinker.example.com"])
def test_a_login_needs_a_safe_address_of_the_server(public_url: str | None) -> None:
    with pytest.raises(ValidationError, match="public_url"):
        Settings(oidc=OidcSettings(**SETTINGS), public_url=public_url)


def a_token(issuer: str, key: RSAKey, header: dict[str, str]) -> dict[str, str]:
    """Return an answer with an ID token that a key has signed."""
    until = int(time.time()) + 600
    claims = {
        "iss": issuer,
        "sub": "1",
        "aud": "me",
        "exp": until,
        "iat": until - 600,
        "nonce": "n",
    }
    return {"id_token": jwt.encode({"alg": "RS256", **header}, claims, key)}


@pytest.mark.parametrize("names", [{"kid": "the-only-one"}, {}], ids=["same id", "no id"])
async def test_a_new_key_of_the_provider_is_noticed_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, names: Any
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(openid_login, "time", SimpleNamespace(monotonic=lambda: clock.now))
    old, new, newest = (RSAKey.generate_key(2048, names, auto_kid=False) for _ in range(3))
    unreadable: list[Any] = [
        {"kty": "EC", "crv": "brainpoolP256r1", "x": "AA", "y": "AA"},
        {"kty": 5},
        "x",
    ]
    with a_provider({}) as provider:
        client = OAuth().register(
            "provider",
            client_cls=ProviderClient,
            client_id="me",
            server_metadata_url=f"{provider.issuer}/.well-known/openid-configuration",
        )

        async def subject(key: RSAKey) -> str:
            token = a_token(provider.issuer, key, names)
            return str((await client.parse_id_token(token, "n"))["sub"])

        for key in (old, new):
            provider.keys = [*unreadable, key.as_dict(private=False)]
            assert await subject(key) == "1"
        provider.keys = [newest.as_dict(private=False)]
        with pytest.raises(BadSignatureError):
            await subject(newest)
        clock.now += 61
        assert await subject(newest) == "1"
        with pytest.raises(BadSignatureError):
            await subject(old)
