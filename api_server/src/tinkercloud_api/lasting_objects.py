"""Keeps the garbage collector away from objects that are never freed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Make objects that stay, such as modules; nothing is collected within the context.

    Collecting them takes an eighth of the startup time, and later stops all requests for a tenth
    of a second each time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
