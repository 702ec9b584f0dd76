"""Drift: others may add fields to applied objects, but not change ours."""

import copy
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tinkercloud_operator.decide.pods.drift import is_up_to_date
from tinkercloud_operator.decide.session.reconcile import children
from tinkercloud_testing.resources.sessions import SAMPLERS, TRAINERS, Json, a_base_model, a_build

keys = st.text("abc", min_size=1, max_size=3)
leaves = st.text(max_size=3) | st.integers() | st.booleans()
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(keys, inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)
manifests: st.SearchStrategy[Json] = st.dictionaries(keys, values, min_size=1, max_size=4)
CHILDREN = children(a_build(a_base_model(trainer=TRAINERS, sampler=SAMPLERS)))
CHANGED = "changed by hand"


def with_extras(wanted: Any, extras: Json) -> Any:
    """Return an object with additional fields at every level."""
    if isinstance(wanted, dict):
        return extras | {key: with_extras(value, extras) for key, value in wanted.items()}
    if isinstance(wanted, list):
        return [with_extras(item, extras) for item in wanted]
    return wanted


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Return the path of every leaf of an object."""
    if isinstance(value, dict):
        return [(key, *path) for key, item in value.items() for path in paths(item)]
    if isinstance(value, list):
        return [(index, *path) for index, item in enumerate(value) for path in paths(item)]
    return [()]


def changed(wanted: Json, path: tuple[Any, ...]) -> Json:
    *above, last = path
    whole = copy.deepcopy(wanted)
    place: Any = whole
    for step in above:
        place = place[step]
    place[last] = CHANGED
    return whole


def without(wanted: Json, path: tuple[Any, ...]) -> Json:
    *above, last = path
    whole = copy.deepcopy(wanted)
    place: Any = whole
    for step in above:
        place = place[step]
    del place[last]
    return whole


@given(manifests, manifests)
def test_fields_added_by_others_are_ignored(wanted: Json, extras: Json) -> None:
    assert is_up_to_date(wanted, with_extras(wanted, extras))


@given(manifests, manifests, st.data())
def test_every_changed_value_is_detected(wanted: Json, extras: Json, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths(wanted)))

    assert not is_up_to_date(wanted, changed(with_extras(wanted, extras), path))


@given(manifests, st.data())
def test_every_removed_value_is_detected(wanted: Json, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths(wanted)))

    assert not is_up_to_date(wanted, without(wanted, path))


@given(manifests, manifests)
def test_an_object_without_our_fields_is_not_up_to_date(wanted: Json, other: Json) -> None:
    assume(not wanted.keys() & other.keys())

    assert not is_up_to_date(wanted, other)


def test_a_missing_object_is_not_up_to_date() -> None:
    assert not is_up_to_date({"kind": "Service"}, None)


@pytest.mark.parametrize("live", [{}, {"labels": {}}, {"labels": None}], ids=str)
def test_an_empty_field_may_be_omitted_by_the_api_server(live: Json) -> None:
    assert is_up_to_date({"labels": {}}, live)
    assert is_up_to_date({"labels": []}, live | {"labels": []})


@pytest.mark.parametrize("wanted", [{}, []], ids=str)
def test_an_empty_field_does_not_match_another_value(wanted: Any) -> None:
    assert not is_up_to_date({"emptyDir": wanted}, {"emptyDir": "a string"})


def test_a_list_with_an_extra_item_is_not_up_to_date() -> None:
    assert not is_up_to_date({"ports": [{"port": 1}]}, {"ports": [{"port": 1}, {"port": 2}]})


@pytest.mark.parametrize("child", CHILDREN, ids=lambda child: child["kind"])
def test_an_edit_anywhere_in_a_real_child_is_detected(child: Json) -> None:
    unnoticed = [path for path in paths(child) if is_up_to_date(child, changed(child, path))]

    assert is_up_to_date(child, child)
    assert unnoticed == []
