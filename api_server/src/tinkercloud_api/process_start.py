"""When this process began; `entry` imports it before what takes seconds to load."""

import time

STARTED_AT = time.monotonic()
"""Time of the monotonic clock, in seconds."""
