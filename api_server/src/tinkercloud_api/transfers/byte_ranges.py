"""Conditional requests and one range of bytes in HTTP (RFC 9110, sections 13 and 14)."""

import re
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime

from tinkercloud_protocol.wire.errors import WireError

_RANGE = re.compile(r"bytes\s*=\s*([0-9]{0,18})\s*-\s*([0-9]{0,18})\s*", re.ASCII | re.IGNORECASE)


class RangeNotSatisfiable(WireError):
    """A range is outside of the content."""

    status = 416
    category = "user"


def is_unchanged(headers: Mapping[str, str], etag: str) -> bool:
    """Return whether a client has the current content (`If-None-Match`).

    Args:
        headers: the request's headers, with names in lower case.
        etag: strong entity tag of the content, in quotes.
    """
    known = [
        each.strip().removeprefix("W/") for each in headers.get("if-none-match", "").split(",")
    ]
    return etag in known or known == ["*"]


def requested(headers: Mapping[str, str], size: int, etag: str, modified: datetime) -> range | None:
    """Return the bytes that a request asks for; None if it asks for all.

    A header that is invalid, or lists several ranges, is ignored, as the RFC permits. So is a range
    of an earlier version of the content (`If-Range`).

    Args:
        headers: the request's headers, with names in lower case.
        size: size of the content in bytes.
        etag: strong entity tag of the content, in quotes.
        modified: when the content was last modified.

    Raises:
        RangeNotSatisfiable: the range has no byte of the content.
    """
    found = _RANGE.fullmatch(headers.get("range", "").strip())
    if found is None or not _is_current(headers.get("if-range"), etag, modified):
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:
        part = range(max(0, size - int(last)), size)
    else:
        if last and int(last) < int(first):
            return None
        part = range(int(first), min(int(last) + 1, size) if last else size)
    if not part:
        raise RangeNotSatisfiable(f"range: {found[0]!r} has no byte of the {size} that there are")
    return part


def _is_current(condition: str | None, etag: str, modified: datetime) -> bool:
    if condition is None or condition == etag:
        return True
    try:
        return parsedate_to_datetime(condition) == modified.replace(microsecond=0)
    except (ValueError, TypeError):
        return False
