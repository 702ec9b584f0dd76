"""`python -m tinkercloud_api` is the `tinkercloud` command."""

from tinkercloud_api.entry import main

main()
