"""What holds for every test."""

import gc

from hypothesis import HealthCheck, settings

# A machine that is busy is slow, and that is nobody's defect.
settings.register_profile(
    "no timing is asserted", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("no timing is asserted")


def pytest_sessionstart() -> None:
    """Let nothing seek garbage while tests are imported, with torch and all the rest: it stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Seek garbage among what tests make, and not over and over again among what they import."""
    gc.freeze()
    gc.enable()
