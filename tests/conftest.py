"""Settings for all tests."""

import gc

from hypothesis import HealthCheck, settings

# Tests may be slow on a busy machine.
settings.register_profile(
    "no deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("no deadline")


def pytest_sessionstart() -> None:
    """Disable garbage collection while tests import torch and other large modules."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection for objects of tests, but not for imported modules."""
    gc.freeze()
    gc.enable()
