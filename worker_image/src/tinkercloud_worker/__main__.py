"""`python -m tinkercloud_worker CONFIG.json`: run a session head."""

import gc

# Imported modules stay in memory. Collecting garbage among them takes a seventh of the startup
# time, and every later collection would traverse them again.
gc.disable()

from tinkercloud_worker.run_head import main  # noqa: E402 - after the garbage collector is disabled

gc.freeze()
gc.enable()

if __name__ == "__main__":
    main()
