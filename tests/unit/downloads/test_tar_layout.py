"""A tar file that is never stored: its size is known, and any part of it can be read."""

import io
import tarfile
from collections.abc import Sequence
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_api.transfers.tar_layout import Segment, StoredObject, cut, tar, total_size

MODIFIED = datetime(2026, 11, 25, tzinfo=UTC)
FILES = st.dictionaries(st.sampled_from(["a.json", "b.safetensors", "c"]), st.binary(max_size=1500))


def stored(files: dict[str, bytes]) -> list[Segment]:
    return tar({name: StoredObject(name, len(each)) for name, each in files.items()}, MODIFIED)


def read(layout: Sequence[Segment], files: dict[str, bytes], part: range) -> bytes:
    pieces = []
    for segment, within in cut(layout, part):
        content = segment if isinstance(segment, bytes) else files[segment.key]
        pieces.append(content[within.start : within.stop])
    return b"".join(pieces)


@given(FILES)
def test_it_contains_the_files(files: dict[str, bytes]) -> None:
    layout = stored(files)

    whole = read(layout, files, range(total_size(layout)))

    assert len(whole) == total_size(layout)
    with tarfile.open(fileobj=io.BytesIO(whole), mode="r:") as archive:
        entries = archive.getmembers()
        contents = [archive.extractfile(entry) for entry in entries]
        assert {e.name: c.read() for e, c in zip(entries, contents, strict=True) if c} == files
        assert all(entry.isfile() and entry.mtime == MODIFIED.timestamp() for entry in entries)


@given(FILES, st.integers(0, 6000), st.integers(0, 6000))
def test_any_part_is_that_part_of_the_whole(files: dict[str, bytes], start: int, stop: int) -> None:
    layout = stored(files)
    size = total_size(layout)
    whole = read(layout, files, range(size))

    assert read(layout, files, range(start, min(stop, size))) == whole[start:stop]


def test_files_of_any_size_have_a_place() -> None:
    huge = 100 << 30

    layout = tar({"model.safetensors": StoredObject("k", huge)}, MODIFIED)

    entry = tarfile.TarInfo.frombuf(layout[0], "utf-8", "strict")  # type: ignore[arg-type]
    assert entry.size == huge
    assert total_size(layout) == huge + 512 + 1024
