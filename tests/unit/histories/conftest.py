"""Histories of the whole operator, which logs nothing."""

from collections.abc import Iterator

import pytest

from tinkercloud_testing.simulation.histories import silence


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    with silence():
        yield
