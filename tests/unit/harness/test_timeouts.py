"""Unit tests have a short timeout unless they set a longer one."""

import pytest


def timeout_of(request: pytest.FixtureRequest) -> tuple[object, ...]:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    return tuple(marker.args)


def test_a_unit_test_has_a_timeout_of_thirty_seconds(request: pytest.FixtureRequest) -> None:
    assert timeout_of(request) == (30,)


@pytest.mark.timeout(60)
def test_a_unit_test_can_set_a_longer_timeout(request: pytest.FixtureRequest) -> None:
    assert timeout_of(request) == (60,)
