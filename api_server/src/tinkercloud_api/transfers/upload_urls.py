"""URLs that allow everyone who has them to upload one file of an import until they expire."""

import hmac
import json
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from urllib.parse import quote, urlencode

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.roles import Role
from tinkercloud_api.transfers.signed_urls import InvalidSignature, UrlGone

PREFIX = "/uploads/"
_PURPOSE = "tinkercloud upload 1"
"""Distinguishes these signatures from any others made with the same key."""


def upload_url(
    base_url: str, key: bytes, *, upload_id: str, file: str, owner: str, expires: int
) -> str:
    """Return the URL for one file of an upload.

    Args:
        base_url: address of the server for clients, without a slash at its end.
        key: the key that all replicas share.
        upload_id: the upload.
        file: name of the file.
        owner: owner of the upload.
        expires: when the URL expires, in seconds since 1970.
    """
    signature = _signature(key, upload_id, file, owner, expires)
    query = urlencode({"owner": owner, "expires": expires, "signature": signature})
    return f"{base_url}{PREFIX}{quote(upload_id)}/{quote(file)}?{query}"


def holder(key: bytes, path: str, query: Mapping[str, str], moment: datetime) -> Principal:
    """Return the caller that a signed URL stands for: its owner.

    Args:
        key: the key that all replicas share.
        path: path of the URL.
        query: its query.
        moment: the current time.

    Raises:
        InvalidSignature: the URL was changed.
        UrlGone: it has expired.
    """
    upload_id, _, file = path.removeprefix(PREFIX).partition("/")
    owner, expires = query.get("owner", ""), query.get("expires", "")
    number = int(expires) if expires.isdecimal() and len(expires) < 16 else 0
    expected = _signature(key, upload_id, file, owner, number)
    if not hmac.compare_digest(expected.encode(), query.get("signature", "").encode()):
        raise InvalidSignature(
            "signature: does not match this URL; use the URL exactly as the server returned it, or"
            " start another upload"
        )
    if number <= moment.timestamp():
        raise UrlGone("expires: this URL has expired; start another upload")
    return Principal(0, "signed URL", owner, Role.USER)


def _signature(key: bytes, upload_id: str, file: str, owner: str, expires: int) -> str:
    terms = [_PURPOSE, upload_id, file, owner, expires]
    return hmac.new(key, json.dumps(terms).encode(), sha256).hexdigest()
