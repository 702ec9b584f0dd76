"""`python -m tinkercloud_api` is the `tinkercloud` command."""

import gc

# What is imported stays: to seek garbage among it took an eighth of the time of a start.
gc.disable()

from tinkercloud_api.cli import main  # noqa: E402 - after the collector's rest has begun

gc.freeze()
gc.enable()

main()
