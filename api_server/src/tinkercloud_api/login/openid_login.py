"""Login with an OpenID provider: from a browser's request to the owner of a new API key.

A login leaves nothing but the key, so a logout is the end of the keys: the account authenticates
once more, and all keys from its logins are revoked.

Authlib does the protocol: discovery, the authorization code flow with PKCE, state and nonce, and
the claims of the ID token. This module adds what Authlib leaves to its users: which algorithms and
issuer are accepted, who may log in, and which owner an account is.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import httpx2
import structlog
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.starlette_client import OAuth, StarletteOAuth2App
from joserfc.errors import BadSignatureError, JoseError
from joserfc.jwk import KeySet
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import RedirectResponse

from tinkercloud_api.access.auth import hash_key, least, new_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.access.project_rows import GROUP
from tinkercloud_api.catalog.access.user_rows import Login, LoginKey
from tinkercloud_api.catalog.schema.tables import ApiKey, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_protocol.wire.errors import Forbidden, InvalidRequest, Unavailable
from tinkercloud_protocol.wire.json_model import Name

log = structlog.get_logger(__name__)

CALLBACK = "/login/callback"
_PROVIDER = "provider"
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
"""Signatures of ID tokens that are accepted: with a public key. A token without a signature, or one
that is signed with a shared secret, is not."""
_LEEWAY_SECONDS = 30
"""How far the clocks of the provider and of this server may differ."""
_TIMEOUT_SECONDS = 10.0
_REFETCH_SECONDS = 60.0
"""Minimum time between two refetches of the provider's keys because of a wrong signature."""
_NAMES: TypeAdapter[str] = TypeAdapter(Name)


class Purpose(StrEnum):
    """The purpose of a login. The state of the flow starts with it.

    Authlib accepts a state only if the browser's signed cookie has it, so the provider's answer for
    one purpose can't be used for another.
    """

    KEY = "key"
    """To see a new key."""
    CONSOLE = "console"
    """To use the console."""
    LOGOUT = "logout"
    """To end the keys of its logins."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a login."""

    purpose: Purpose
    owner: str
    """The owner that the account is."""
    issued: tuple[str, ApiKey] | None
    """A new key, and its row; None for a logout."""
    groups: frozenset[str] = frozenset()
    """The groups of the account that can be members of projects; none for a logout."""
    ended: Sequence[ApiKey] = ()
    """Earlier keys that the new one has ended."""


@dataclass(frozen=True, slots=True)
class Identity:
    """An account that may log in."""

    subject: str
    """Issuer and subject, which identify it forever."""
    name: str
    """The owner that it names."""
    role: Role
    groups: frozenset[str]
    """Its groups that can be members of projects."""


def identify(claims: Mapping[str, Any], settings: OidcSettings) -> Identity:
    """Return who an account is, from the verified claims of its ID token.

    Raises:
        Forbidden: it may not log in, or does not say which owner it is.
    """
    groups = _names(claims.get(settings.groups_claim))
    if not settings.allow_all_accounts and not groups & set(settings.allowed_groups):
        raise Forbidden(
            "the account is in none of the groups that may log in (claim"
            f" {settings.groups_claim!r}); ask an administrator"
        )
    claim = settings.owner_claim
    try:
        name = _NAMES.validate_python(claims.get(claim), strict=True)
    except ValidationError:
        raise Forbidden(
            f"the ID token has no usable claim {claim!r}, which names the owner of the keys"
            " (oidc.owner_claim)"
        ) from None
    if name.startswith(GROUP):
        raise Forbidden(f"the owner {name!r} (claim {claim!r}) has the name of a group")
    if claim == "email" and claims.get("email_verified") is not True:
        raise Forbidden(f"the provider has not verified the address {name!r} (email_verified)")
    ranked = [Role(settings.roles[group]) for group in groups & settings.roles.keys()]
    role = most(ranked) if ranked else Role.USER
    usable = frozenset(group for group in groups if _is_name(group))
    return Identity(subject_of(claims, settings), name, role, usable)


def subject_of(claims: Mapping[str, Any], settings: OidcSettings) -> str:
    """Return issuer and subject of an account, from the verified claims of its ID token."""
    return f"{settings.issuer}|{claims['sub']}"


def _names(value: object) -> set[str]:
    """Return the groups that a claim names: a list, or one group."""
    named = value if isinstance(value, list) else [value]
    return {name for name in named if isinstance(name, str)}


def _is_name(text: str) -> bool:
    try:
        _NAMES.validate_python(text)
    except ValidationError:
        return False
    return True


def most(roles: list[Role]) -> Role:
    """Return the role with most rights."""
    return next(role for role in roles if all(least(role, other) is other for other in roles))


class ProviderClient(StarletteOAuth2App):  # type: ignore[misc]  # Authlib has no types
    """Authlib's client, which notices a new key under the id of an old one, or without an id.

    Authlib fetches the provider's keys again for an unknown key id only.
    """

    _refetched_at = -_REFETCH_SECONDS

    async def fetch_jwk_set(self, force: bool = False) -> Mapping[str, Any]:  # noqa: FBT001, FBT002 - Authlib's
        """Return the provider's keys, without those that cannot be read (RFC 7517, section 5)."""
        found = await super().fetch_jwk_set(force=force)
        return {**found, "keys": [key for key in found.get("keys", []) if _is_readable(key)]}

    async def parse_id_token(self, token: Any, nonce: str, **options: Any) -> Any:  # noqa: ANN401 - Authlib has no types
        """Return the claims of an ID token; if its signature is wrong, try the keys of today."""
        try:
            return await super().parse_id_token(token, nonce, **options)
        except BadSignatureError:
            if time.monotonic() - self._refetched_at < _REFETCH_SECONDS:
                raise
        self._refetched_at = time.monotonic()
        await super().fetch_jwk_set(force=True)
        return await super().parse_id_token(token, nonce, **options)


def _is_readable(key: Any) -> bool:  # noqa: ANN401 - any JSON
    try:
        KeySet.import_key_set({"keys": [key]})
    except (JoseError, LookupError, TypeError, ValueError, AttributeError):
        return False
    return True


class Logins:
    """Logs accounts in. Belongs to one event loop."""

    def __init__(self, settings: OidcSettings, public_url: str, catalog: Catalog) -> None:
        """Use a provider.

        Raises:
            OSError: the file with the secret cannot be read.
        """
        self._settings = settings
        self._catalog = catalog
        self._redirect_uri = public_url.rstrip("/") + CALLBACK
        issuer = settings.issuer.rstrip("/")
        self._oauth = OAuth()
        self._oauth.register(
            _PROVIDER,
            client_cls=ProviderClient,
            server_metadata_url=f"{issuer}/.well-known/openid-configuration",
            client_id=settings.client_id,
            client_secret=settings.client_secret_file.read_text().strip(),
            client_kwargs={
                "scope": settings.scopes,
                "code_challenge_method": "S256",
                "timeout": _TIMEOUT_SECONDS,
            },
        )

    async def start(self, request: Request, purpose: Purpose) -> RedirectResponse:
        """Return a redirect to the provider; the session of the request keeps state and nonce.

        Args:
            request: the request of the browser.
            purpose: what the account is to authenticate for.

        Raises:
            Unavailable: the provider does not respond, or is not the configured one.
        """
        try:
            client = await self._provider()
            state = f"{purpose}.{secrets.token_urlsafe(32)}"
            answer = await client.authorize_redirect(request, self._redirect_uri, state=state)
        except (httpx2.HTTPError, AuthlibBaseError, ValueError, RuntimeError) as error:
            raise _unavailable(error) from error
        assert isinstance(answer, RedirectResponse)  # noqa: S101 - what Authlib returns
        return answer

    async def finish(self, request: Request) -> Outcome:
        """Issue a key for the account that the provider has authenticated, if it logs in.

        Returns:
            What `start` was called for. After a logout, `end_keys` is to be called.

        Raises:
            InvalidRequest: the request does not belong to a login of this browser, or what the
                provider sent is not valid.
            Forbidden: the account may not log in, or has never done so before it logs out.
            Unavailable: the provider does not respond.
        """
        purpose, claims = await self._authenticated(request)
        if purpose is Purpose.LOGOUT:
            return Outcome(purpose, await self._owner(subject_of(claims, self._settings)), None)
        name = LoginKey.CONSOLE if purpose is Purpose.CONSOLE else LoginKey.SHOWN
        identity = identify(claims, self._settings)
        key, row, ended = await self._issue(identity, name, now())
        return Outcome(purpose, row.owner, (key, row), identity.groups, ended)

    async def end_keys(self, owner: str) -> None:
        """Revoke all keys from logins of an owner, for the next request of all servers."""
        await self._catalog.revoke_login_keys(owner)
        log.info("logged out", owner=owner)

    async def _authenticated(self, request: Request) -> tuple[Purpose, Mapping[str, Any]]:
        """Return the purpose of a login at the provider, and the claims of the account."""
        try:
            purpose = Purpose(request.query_params.get("state", "").partition(".")[0])
            client = await self._provider()
            token = await client.authorize_access_token(
                request, leeway=_LEEWAY_SECONDS, claims_options=self._claims()
            )
        except httpx2.HTTPError as error:
            raise _unavailable(error) from error
        except (
            AuthlibBaseError,
            JoseError,
            ValueError,
            TypeError,
            LookupError,
            RuntimeError,
        ) as error:
            log.warning("a login was refused", error=f"{type(error).__name__}: {error}"[:500])
            raise InvalidRequest(
                "the login is not valid or has expired; start it again at /login"
            ) from error
        claims: Mapping[str, Any] | None = token.get("userinfo")
        if not claims:
            raise InvalidRequest("the provider sent no ID token; start again at /login")
        return purpose, claims

    async def _owner(self, subject: str) -> str:
        """Return the owner of an account, even of one that may no longer log in."""
        owner = await self._catalog.owner_of(subject)
        if owner is None:
            raise Forbidden("the account has never logged in here, so that it has no keys to end")
        return owner

    async def _issue(
        self, identity: Identity, name: LoginKey, moment: datetime
    ) -> tuple[str, ApiKey, Sequence[ApiKey]]:
        key = new_key()
        weaker = [role for role in Role if least(role, identity.role) is role]
        row, ended = await self._catalog.log_in(
            Login(
                subject=identity.subject,
                name=identity.name,
                role=identity.role,
                kept_roles=frozenset(weaker),
                groups=identity.groups,
                key_name=name,
                key_hash=hash_key(key),
                expires_at=moment + timedelta(days=self._settings.key_days),
            )
        )
        log.info("logged in", owner=row.owner, key_id=row.id, role=row.role)
        return key, row, ended

    def _claims(self) -> dict[str, Any]:
        """Return what the claims of an ID token must be."""
        essential = {"essential": True}
        return {
            "iss": {**essential, "value": self._settings.issuer},
            "aud": {**essential, "value": self._settings.client_id},
            **dict.fromkeys(("sub", "exp", "iat", "nonce"), essential),
        }

    async def _provider(self) -> Any:  # noqa: ANN401 - Authlib has no types
        """Return Authlib's client, with the provider's metadata restricted to what is accepted.

        Raises:
            Unavailable: the metadata are those of another issuer.
        """
        client = self._oauth.create_client(_PROVIDER)
        metadata = await client.load_server_metadata()
        if metadata.get("issuer") != self._settings.issuer:
            raise Unavailable(
                f"the OpenID provider calls itself {str(metadata.get('issuer'))[:200]!r}, not"
                f" {self._settings.issuer!r} (oidc.issuer)"
            )
        offered = metadata.get("id_token_signing_alg_values_supported") or ["RS256"]
        metadata["id_token_signing_alg_values_supported"] = [
            each for each in _ALGORITHMS if each in offered
        ] or ["RS256"]
        return client


def _unavailable(error: Exception) -> Unavailable:
    log.warning("the OpenID provider failed", error=f"{type(error).__name__}: {error}"[:500])
    return Unavailable("the OpenID provider does not respond; try again")
