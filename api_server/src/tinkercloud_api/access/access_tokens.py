"""Access tokens: JWTs (RFC 7519) for which the SDK exchanges an API key, and which it reads.

A token names the key that it was issued for. It is valid as long as that key is, at most an hour.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OctKey

PREFIX = "eyJ"
"""How every token starts, and no API key."""
_ALGORITHM = "HS256"
_LIFETIME = timedelta(hours=1)
_ISSUER = "tinkercloud"
_TRACES = "tinkercloud-traces"
"""Issuer of tokens that are no API keys."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token whose signature was verified."""

    key_id: int
    expires_at: float
    """Seconds from 1970-01-01 in UTC."""


class AccessTokens:
    """Issues and verifies tokens, with a secret that all replicas share."""

    def __init__(self, secret: str) -> None:
        """Use a secret."""
        self._key = OctKey.import_key(secret.encode())

    def issue(self, *, key_id: int, owner: str, moment: datetime, ends_at: datetime | None) -> str:
        """Return a token for a key.

        Args:
            key_id: the key.
            owner: its owner, `sub` of the token.
            moment: the time.
            ends_at: when the key expires; None means never.
        """
        expires_at = min(moment + _LIFETIME, ends_at or moment + _LIFETIME)
        claims: dict[str, Any] = {
            "iss": _ISSUER,
            "sub": owner,
            # What the SDK's `whoami` reads, apart from `sub`.
            "org_id": _ISSUER,
            "email": owner if "@" in owner else "",
            "key_id": key_id,
            "iat": int(moment.timestamp()),
            "exp": int(expires_at.timestamp()),
        }
        return jwt.encode({"alg": _ALGORITHM}, claims, self._key)

    def issue_trace(self, session_id: str, moment: datetime) -> str:
        """Return a token that allows nothing but to download the trace of a session."""
        ends_at = int((moment + _LIFETIME).timestamp())
        claims: dict[str, Any] = {"iss": _TRACES, "sub": session_id, "exp": ends_at}
        return jwt.encode({"alg": _ALGORITHM}, claims, self._key)

    def read_trace(self, text: str, moment: datetime) -> str | None:
        """Return the session of a token for a trace; None if it is wrong or has expired."""
        claims = self._claims(text)
        if claims.get("iss") != _TRACES or claims.get("exp", 0) <= moment.timestamp():
            return None
        return str(claims["sub"])

    def read(self, text: str) -> Token | None:
        """Return a token, which may have expired; None if this server did not issue it."""
        claims = self._claims(text)
        key_id, expires_at = claims.get("key_id"), claims.get("exp")
        if claims.get("iss") != _ISSUER or not isinstance(key_id, int):
            return None
        return Token(key_id, float(expires_at)) if isinstance(expires_at, int) else None

    def _claims(self, text: str) -> dict[str, Any]:
        """Return the claims of a token that this server has signed; none of others."""
        try:
            return dict(jwt.decode(text, self._key, algorithms=[_ALGORITHM]).claims)
        except (JoseError, ValueError, TypeError, AttributeError, KeyError):
            # joserfc reads headers of any type before it verifies them.
            return {}
