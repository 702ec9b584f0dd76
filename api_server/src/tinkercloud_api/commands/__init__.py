"""Groups of `tinkercloud` commands that call a running server, and what all commands share."""
