"""What holds for every test."""

from hypothesis import HealthCheck, settings

# A machine that is busy is slow, and that is nobody's defect.
settings.register_profile(
    "no timing is asserted", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("no timing is asserted")
