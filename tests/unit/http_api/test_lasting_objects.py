"""What stays as long as the server is not looked at by the garbage collector again."""

import gc
from collections.abc import Iterator

import pytest

from tinkercloud_api.lasting_objects import lasting_objects


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_objects_that_stay_are_never_looked_at_again() -> None:
    with lasting_objects():
        kept = [[number] for number in range(1000)]
        was_enabled = gc.isenabled()

    assert not was_enabled
    assert gc.isenabled()
    assert not any(each is kept for each in gc.get_objects())


def test_the_collector_runs_again_after_a_failed_start() -> None:
    with pytest.raises(ValueError, match="no start"), lasting_objects():
        raise ValueError("no start")

    assert gc.isenabled()
