"""`python -m tinkercloud_api` is the `tinkercloud` command."""

from tinkercloud_api.cli import main

main()
