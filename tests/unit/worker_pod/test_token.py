"""A head serves requests with its token, also after the token is replaced."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tinkercloud_worker.head.wire import head_token as token_module
from tinkercloud_worker.head.wire.head_token import HeadToken


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the file at every wrong token."""
    monkeypatch.setattr(token_module, "_RELOAD_SECONDS", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


def test_only_the_token_is_accepted(file: Path) -> None:
    token = HeadToken(file)

    assert token.is_carried_by("first")
    assert not token.is_carried_by("guessed")
    assert not token.is_carried_by("")


def test_a_new_token_and_the_previous_one_are_accepted(file: Path) -> None:
    token = HeadToken(file)

    file.write_text("second")

    assert token.is_carried_by("second")
    assert token.is_carried_by("first")


def test_a_token_is_accepted_until_it_is_replaced_twice(file: Path) -> None:
    token = HeadToken(file)

    for content in ("second", "third"):
        file.write_text(content)
        assert token.is_carried_by(content)

    assert not token.is_carried_by("first")


@pytest.mark.parametrize("vandalise", [Path.unlink, lambda file: file.write_text("")])
def test_a_token_stays_valid_if_its_file_breaks(
    file: Path, vandalise: Callable[[Path], object]
) -> None:
    token = HeadToken(file)

    vandalise(file)

    assert not token.is_carried_by("")
    assert token.is_carried_by("first")


def test_an_empty_token_is_rejected_at_startup(file: Path) -> None:
    file.write_text("\n")

    with pytest.raises(ValueError, match="is empty"):
        HeadToken(file)
