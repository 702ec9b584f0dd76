"""`python -m tinkercloud_worker CONFIG.json`: run a session head."""

import gc

# What is imported stays. To seek garbage among it took a seventh of the time of a start, and every
# later search would go over all of it again.
gc.disable()

from tinkercloud_worker.run_head import main  # noqa: E402 - after the collector's rest has begun

gc.freeze()
gc.enable()

if __name__ == "__main__":
    main()
