"""The last known state of objects: the newest resource version wins, wherever it came from."""

from typing import Any

import pytest

from tinkercloud_kube.objects import Change, Objects


def stored(version: int, uid: str = "first", name: str = "a") -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}}


def keep(manifest: Any) -> str:
    metadata = manifest["metadata"]
    return f"{metadata['uid']}@{metadata['resourceVersion']}"


@pytest.fixture
def objects() -> Objects[str]:
    """Objects of which one is known, at resource version 7."""
    made = Objects(keep)
    made.note(stored(7))
    return made


def test_a_newer_state_replaces_an_older_one(objects: Objects[str]) -> None:
    assert objects.note(stored(8)) == Change("a", "first@7", "first@8")
    assert dict(objects) == {"a": "first@8"}


@pytest.mark.parametrize("version", [6, 7])
def test_a_state_that_is_not_newer_changes_nothing(objects: Objects[str], version: int) -> None:
    assert objects.note(stored(version)) is None
    assert dict(objects) == {"a": "first@7"}


def test_resource_versions_are_compared_as_numbers(objects: Objects[str]) -> None:
    assert objects.note(stored(10)) is not None


def test_a_late_event_does_not_restore_a_deleted_object(objects: Objects[str]) -> None:
    assert objects.note(stored(8), is_gone=True) == Change("a", "first@7", None)

    assert objects.note(stored(7)) is None
    assert dict(objects) == {}


def test_the_deletion_of_an_object_does_not_remove_its_successor(objects: Objects[str]) -> None:
    objects.note(stored(9, "second"))

    assert objects.note(stored(8), is_gone=True) is None
    assert dict(objects) == {"a": "second@9"}


def test_the_deletion_of_an_unknown_object_is_news_once(objects: Objects[str]) -> None:
    assert objects.note(stored(3, "b", "b"), is_gone=True) == Change("b", None, None)
    assert objects.note(stored(3, "b", "b"), is_gone=True) is None


def test_a_complete_list_removes_what_is_missing_from_it(objects: Objects[str]) -> None:
    changes = objects.replace([stored(8, "b", "b")], version=9)

    assert changes == [Change("b", None, "b@8"), Change("a", "first@7", None)]
    assert dict(objects) == {"b": "b@8"}


def test_a_complete_list_keeps_what_is_newer_than_it(objects: Objects[str]) -> None:
    assert objects.replace([], version=6) == []
    assert dict(objects) == {"a": "first@7"}


def test_a_complete_list_ends_the_memory_of_deletions_before_it(objects: Objects[str]) -> None:
    objects.note(stored(8), is_gone=True)
    objects.note(stored(12, "b", "b"), is_gone=True)

    objects.replace([], version=9)

    assert objects.note(stored(11, "b", "b")) is None
    assert objects.note(stored(8)) == Change("a", None, "first@8")


def test_an_object_that_is_not_kept_is_left_out() -> None:
    objects: Objects[str] = Objects(lambda manifest: None)

    assert objects.note(stored(7)) == Change("a", None, None)
    assert dict(objects) == {}


def test_a_forgotten_object_is_known_again_as_soon_as_it_is_reported(objects: Objects[str]) -> None:
    assert objects.forget("a") == Change("a", "first@7", None)
    assert objects.forget("a") is None

    objects.note(stored(7))

    assert dict(objects) == {"a": "first@7"}
