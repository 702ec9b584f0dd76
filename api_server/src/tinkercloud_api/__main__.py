"""`python -m tinkercloud_api` is the `tinkercloud` command."""

import gc

# Imported modules are never freed; collecting them took an eighth of the startup time.
gc.disable()

from tinkercloud_api.cli import main  # noqa: E402 - after the garbage collector is disabled

gc.freeze()
gc.enable()

main()
