"""Ranges of bytes are those of RFC 9110."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_api.transfers.byte_ranges import RangeNotSatisfiable, requested

MODIFIED = datetime(2026, 11, 25, 12, 0, 0, 5, tzinfo=UTC)
CONTENT = bytes(range(100))


def asked(value: str | None, size: int = 100, if_range: str | None = None) -> range | None:
    given_headers = {"range": value, "if-range": if_range}
    headers = {name: text for name, text in given_headers.items() if text is not None}
    return requested(headers, size, '"tag"', MODIFIED)


@given(st.integers(0, 99), st.integers(0, 200))
def test_first_and_last_byte_are_included(first: int, length: int) -> None:
    part = asked(f"bytes={first}-{first + length}")

    assert part is not None
    assert [*part] == [*CONTENT[first : first + length + 1]]


@given(st.integers(1, 200))
def test_a_suffix_is_the_end_of_the_content(count: int) -> None:
    part = asked(f"bytes=-{count}")

    assert part is not None
    assert [*part] == [*CONTENT[-count:]]


def test_an_open_range_continues_to_the_end() -> None:
    assert asked("bytes=40-") == range(40, 100)
    assert asked("Bytes = 40 - ") == range(40, 100)


@pytest.mark.parametrize("value", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_outside_of_the_content_is_an_error(value: str) -> None:
    with pytest.raises(RangeNotSatisfiable, match="no byte of the 100"):
        asked(value)
    with pytest.raises(RangeNotSatisfiable):
        asked("bytes=0-", size=0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "bytes=",
        "bytes=-",
        "bytes=5-2",
        "bytes=1-2,5-6",
        "lines=1-2",
        "bytes=a-b",
        "bytes=\u0661-",
    ],
)
def test_other_headers_are_ignored(value: str | None) -> None:
    assert asked(value) is None


@given(st.text(max_size=30))
def test_no_header_is_misread(value: str) -> None:
    try:
        part = asked(value)
    except RangeNotSatisfiable:
        return
    assert part is None or 0 <= part.start < part.stop <= 100


@pytest.mark.parametrize(
    ("condition", "is_current"),
    [
        ('"tag"', True),
        ("Wed, 25 Nov 2026 12:00:00 GMT", True),
        ('"other"', False),
        ('W/"tag"', False),
        ("Wed, 25 Nov 2026 12:00:01 GMT", False),
        ("nonsense", False),
    ],
)
def test_a_range_of_an_earlier_content_is_ignored(condition: str, is_current: bool) -> None:
    assert (asked("bytes=40-", if_range=condition) is not None) == is_current
