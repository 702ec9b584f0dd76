"""What holds for every test."""

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy is slow, and that is nobody's defect.
settings.register_profile(
    "no timing is asserted", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("no timing is asserted")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests together where several workers run tests: they share fixtures."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
