"""This release, and the versions of what one release writes and another one reads.

Each such format has a number, which grows when a release before would misread it. A release reads
its own number and that of the release before; docs/operate/upgrades.md lists all of them.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version


@cache
def this_release() -> str:
    """Return the version of this installation, such as `0.1.0`."""
    return version("tinkercloud-protocol")


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of a format that this release reads; it writes the newest one."""

    oldest: int
    newest: int

    def __contains__(self, found: int) -> bool:
        return self.oldest <= found <= self.newest

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"version {self.newest}"
        return f"versions {self.oldest} to {self.newest}"

    def refusal(self, what: str, found: int, writer: str | None) -> str | None:
        """Return why this release can't read something, and which one can; None if it can.

        Args:
            what: a file or an object.
            found: its version.
            writer: the release that wrote it; None if it does not say so.
        """
        if found in self:
            return None
        named = f" (of release {writer})" if writer else ""
        which = f"release {writer} or newer" if writer else "the release that wrote it, or newer"
        if found < self.oldest:
            which = "an earlier release to upgrade it"
        return (
            f"{what} has version {found}{named}, and release {this_release()} reads"
            f" {self}; use {which}"
        )
