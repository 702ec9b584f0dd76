"""Sockets of HTTP clients that notice when the machine of their peer is gone."""

import socket

_KEEPALIVE = {
    "TCP_KEEPIDLE": 30,
    # Name of the same option on macOS.
    "TCP_KEEPALIVE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
}
"""Options that detect a dead peer within a minute; not every system has all of them."""


def keepalive_socket(address: tuple[object, ...]) -> socket.socket:
    """Return a socket with TCP keepalive, for an address as `getaddrinfo` returns it."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)  # type: ignore[arg-type]  # as getaddrinfo gave it
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
