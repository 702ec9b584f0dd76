"""Sockets on which the API server listens."""

import errno
import socket


class PortTakenError(Exception):
    """The address is not available, for example because another program listens on it."""


def bind(host: str, port: int, setting: str = "--port or TINKERCLOUD_PORT") -> socket.socket:
    """Return a TCP socket of an address of this machine; it does not listen yet.

    Args:
        host: the address.
        port: the port.
        setting: what chooses the port, for the error message.

    Raises:
        PortTakenError: the address is not available.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        what = f"another port with {setting}"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            what = "an address of this machine with --host or TINKERCLOUD_HOST"
        raise PortTakenError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose {what}"
        ) from None
    return bound
