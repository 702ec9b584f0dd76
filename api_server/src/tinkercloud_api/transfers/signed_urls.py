"""URLs that allow everyone who has them to download one file until they expire.

The query of a URL contains the terms of the grant and their HMAC-SHA256. Checking one needs
neither the catalog nor the store, and so comes first.
"""

import hmac
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from urllib.parse import quote, urlencode

from tinkercloud_api.config import readable
from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_protocol.wire.paths import CheckpointPath

PREFIX = "/downloads"
_PURPOSE = "tinkercloud download 1"
"""Distinguishes these signatures from any others made with the same key."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class InvalidSignature(WireError):
    """A signed URL was changed, or was signed with another key."""

    status = 403
    category = "user"


class UrlGone(WireError):
    """A signed URL has expired, or what it refers to was replaced."""

    status = 410
    category = "user"


@dataclass(frozen=True, slots=True)
class Grant:
    """The permission to download one file."""

    path: CheckpointPath
    file: str
    saved: int
    """When the checkpoint was saved, in microseconds since 1970: one that is saved at the same path
    later is a different one."""
    owner: str
    """Owner of the key with which the URL was requested."""
    expires: int
    """In seconds since 1970."""


def microseconds(moment: datetime) -> int:
    """Return a time in microseconds since 1970, exactly."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def signature(key: bytes, grant: Grant) -> str:
    """Return the HMAC of a grant, in hexadecimal."""
    terms = [_PURPOSE, str(grant.path), grant.file, grant.saved, grant.owner, grant.expires]
    return hmac.new(key, json.dumps(terms).encode(), sha256).hexdigest()


def signed_url(base_url: str, key: bytes, grant: Grant) -> str:
    """Return the URL of a grant.

    Args:
        base_url: address of the server for clients, without a slash at its end.
        key: the key that all replicas share.
        grant: what the URL allows.
    """
    path = grant.path
    segments = (path.run_id, path.kind, path.name, grant.file)
    where = "/".join(quote(segment, safe=":") for segment in segments)
    terms = {name: getattr(grant, name) for name in ("owner", "saved", "expires")}
    query = urlencode({**terms, "signature": signature(key, grant)})
    return f"{base_url}{PREFIX}/{where}?{query}"


def check(key: bytes, grant: Grant, given: str, moment: datetime) -> None:
    """Check the signature of a grant, in constant time, and then whether it has expired.

    Raises:
        InvalidSignature: the signature does not match the grant.
        UrlGone: the grant has expired.
    """
    if not hmac.compare_digest(signature(key, grant).encode(), given.encode()):
        raise InvalidSignature(
            "signature: does not match this URL; use the URL exactly as the server returned it, or"
            " request a new one"
        )
    if grant.expires <= moment.timestamp():
        expired_at = readable.moment(datetime.fromtimestamp(grant.expires, UTC))
        raise UrlGone(f"expires: this URL expired at {expired_at}; request a new one")
