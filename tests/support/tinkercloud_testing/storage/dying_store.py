"""A checkpoint store whose process dies after a number of writes."""

from typing import Any

import obstore

_WRITES = {"put_async", "rename_async", "delete_async"}


class Death(Exception):
    """Stands for the end of the process."""


class DyingObstore:
    """A replacement for the module `obstore` that raises `Death` after a number of writes."""

    def __init__(self, writes_until_death: int) -> None:
        self.left = writes_until_death

    def __getattr__(self, name: str) -> Any:
        """Return a function of `obstore`; those that write count."""
        function = getattr(obstore, name)
        if name not in _WRITES:
            return function

        async def write(*arguments: object, **keywords: object) -> object:
            if self.left == 0:
                raise Death
            self.left -= 1
            return await function(*arguments, **keywords)

        return write
