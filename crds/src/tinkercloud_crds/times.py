"""Times as Kubernetes writes them: RFC 3339, in UTC."""

from datetime import datetime


def parse_time(text: str | None) -> datetime | None:
    """Parse an RFC 3339 time.

    RFC 3339 requires an offset, and without one a time is ambiguous. So a time without an offset,
    like a date or any other text, is treated as missing.

    Returns:
        A time with a time zone; None if there is no text or if it is not an RFC 3339 time.
    """
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None
