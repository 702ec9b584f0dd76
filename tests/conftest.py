"""What holds for every test."""

from hypothesis import settings

# A machine that is busy is slow, and that is nobody's defect.
settings.register_profile("no timing is asserted", deadline=None)
settings.load_profile("no timing is asserted")
