"""A tokenizer's revision changes with its files, which are read again only when they change."""

import os
from pathlib import Path

import pytest

from tinkercloud_api.routes.models import hub_mirror

revision_of = hub_mirror._commit


def test_the_revision_depends_on_the_content(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    first = revision_of([file])

    file.write_text("[]")
    os.utime(file, ns=(1, 1))
    second = revision_of([file])
    file.write_text("{}")
    os.utime(file, ns=(2, 2))

    assert first != second
    assert revision_of([file]) == first


def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "tokenizer.json", tmp_path / "vocab.json"]
    for file in files:
        file.write_text("{}")
    read: list[Path] = []
    real = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", counted)

    revisions = {revision_of(files) for _ in range(10)}

    assert (len(revisions), read) == (1, files)
