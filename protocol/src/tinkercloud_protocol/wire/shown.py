"""How messages show values that a client sent."""

import reprlib
from typing import Any


class _Shortener(reprlib.Repr):
    """Represents a value without reading more of it than is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:  # noqa: ARG002 - reprlib's
        return f"an object of {len(x)} entries"


_shortener = _Shortener()


def shown(value: object) -> str:
    """Return a received value as it is shown in a message: at most 80 characters."""
    text = _shortener.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
