"""Settings of the login with an OpenID provider."""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tinkercloud_api.config.sections.download_settings import PublicUrl

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class OidcSettings(BaseModel):
    """An OpenID provider, and what its accounts may do here."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    issuer: PublicUrl
    """Issuer of the provider: its address, below which `/.well-known/openid-configuration` is."""
    client_id: Annotated[str, Field(min_length=1)]
    """Id of this server at the provider. Its redirect URI is `<public_url>/login/callback`."""
    client_secret_file: Path
    """File with the secret of this server at the provider."""
    scopes: str = "openid email profile"
    """Scopes that are requested, separated by spaces."""
    owner_claim: Annotated[str, Field(min_length=1)] = "email"
    """Claim of the ID token whose value names the owner of the keys. Users must not be able to
    choose it freely. `email` counts only if the claim `email_verified` is true."""
    groups_claim: Annotated[str, Field(min_length=1)] = "groups"
    """Claim of the ID token with the groups of the account."""
    allowed_groups: list[str] = []
    """Groups whose accounts may log in. Required unless `allow_all_accounts` is true."""
    allow_all_accounts: bool = False
    """Whether all accounts of the provider may log in."""
    roles: dict[str, Literal["admin", "user", "read-only"]] = Field(
        default_factory=dict, examples=[{"ml-platform": "admin"}]
    )
    """Role of the keys of each group; the one with most rights counts. Others are users."""
    key_days: Annotated[int, Field(ge=1, le=365)] = 30
    """How long, in days, a key from a login is valid."""

    @model_validator(mode="after")
    def _check(self) -> "OidcSettings":
        _check_secure("issuer", self.issuer)
        if not self.allowed_groups and not self.allow_all_accounts:
            raise ValueError(
                "allowed_groups: name the groups whose accounts may log in, or set"
                " allow_all_accounts=true"
            )
        if "openid" not in self.scopes.split():
            raise ValueError(f"scopes: must contain 'openid', got {self.scopes!r}")
        return self

    def check_public_url(self, public_url: str | None) -> None:
        """Check the address to which the provider sends browsers back.

        Raises:
            ValueError: it is not set, or does not use https.
        """
        if public_url is None:
            raise ValueError("public_url: required with oidc, as the provider redirects to it")
        _check_secure("public_url", public_url)


def _check_secure(name: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in _LOOPBACK:
        raise ValueError(f"{name}: must begin with https://, got {url!r}")
