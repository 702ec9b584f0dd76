"""The format of journals: what was written is read, a torn tail is cut, and damage is named."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_worker.journal import records
from tinkercloud_worker.journal.records import DamagedJournal, Entry, Record

ENTRIES = st.builds(
    Entry,
    seq_id=st.integers(1, 2**31),
    path=st.sampled_from(["/forward_backward", "/optim_step"]),
    role=st.sampled_from(["gradient", "step", "save", "load", "other"]),
    digest=st.binary(max_size=16).map(bytes.hex),
    size=st.integers(0, 2**40),
    knows_of=st.none() | st.text(max_size=8),
    key=st.none() | st.text(max_size=8),
    read=st.lists(st.text(max_size=4), max_size=3).map(tuple),
)
JOURNALS = st.lists(st.tuples(ENTRIES, st.binary(max_size=64)), max_size=6).map(
    lambda written: [Record(n, entry, body) for n, (entry, body) in enumerate(written)]
)


def encoded(written: Sequence[Record]) -> bytes:
    return b"".join(map(records.encode, written))


@given(JOURNALS)
def test_what_was_written_is_read(written: list[Record]) -> None:
    content = encoded(written)

    assert records.decode(content, "it") == (written, len(content))


@given(JOURNALS, st.data())
def test_any_prefix_has_the_records_that_are_complete(
    written: list[Record], data: st.DataObject
) -> None:
    content = encoded(written)
    size = data.draw(st.integers(0, len(content)))
    complete = [n for n in range(len(written) + 1) if len(encoded(written[:n])) <= size][-1]

    found, end = records.decode(content[:size], "it")

    assert found == written[:complete]
    assert end == len(encoded(found))


@given(JOURNALS, st.data())
def test_a_tail_that_reads_as_zeros_is_cut(written: list[Record], data: st.DataObject) -> None:
    content = encoded(written)
    size = data.draw(st.integers(0, len(content)))
    zeros = data.draw(st.integers(0, 64))

    try:
        found, _ = records.decode(content[:size] + bytes(zeros), "it")
    except DamagedJournal:
        # Part of a header, then zeros, is indistinguishable from damage.
        return

    assert found == written[: len(found)]
    assert len(encoded(written[: len(found) + 1])) > size or len(found) == len(written)


@given(JOURNALS.filter(bool), st.data())
def test_any_other_byte_is_named_as_damage_or_cuts_only_the_end(
    written: list[Record], data: st.DataObject
) -> None:
    content = bytearray(encoded(written))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))

    try:
        found, _ = records.decode(bytes(content), "segment 3")
    except DamagedJournal as error:
        assert "segment 3: the record at byte" in error.message  # noqa: PT017 - or not raised
        return

    # A last record that ends with a zero looks like one that was not completely written.
    assert found == written[:-1]
    assert at >= len(encoded(written[:-1]))


@given(JOURNALS, st.data())
def test_segments_are_joined_unless_records_between_them_are_missing(
    written: list[Record], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=3)))
    bounds = [0, *cuts, len(written)]
    segments = [("it", written[a:b]) for a, b in pairwise(bounds)]

    assert records.join(segments) == written
    if len(written) > 2:
        with pytest.raises(DamagedJournal, match="between them are missing"):
            records.join([("a", written[:1]), ("b", written[2:])])
