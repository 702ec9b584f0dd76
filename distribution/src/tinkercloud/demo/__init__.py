"""`tinkercloud demo`: three examples that train a small model, with the SDK."""

import tinkercloud_api.process_start  # noqa: F401 - before what takes seconds to load
