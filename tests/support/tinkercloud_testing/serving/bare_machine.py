"""Importing this makes a process behave as if only torch and transformers were installed.

After that, imports and version queries do not find other distributions. pydantic is hidden too,
although recent versions of typer, a dependency of transformers, depend on it.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INSTALLED = ("torch", "transformers")
NOT_BROUGHT_BY_ALL = {"pydantic"}
OURS = ("benchmarks", "tinkercloud_")


def brought(names: Sequence[str]) -> set[str]:
    """Return the installed distributions that pip would install for some names."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in found or name in NOT_BROUGHT_BY_ALL:
            continue
        try:
            needs = [Requirement(need) for need in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        found.add(name)
        left += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return found


ADMITTED = brought(INSTALLED)
REFUSED = {
    module
    for module, owners in packages_distributions().items()
    if not module.startswith(OURS) and ADMITTED.isdisjoint(map(canonicalize_name, owners))
}


class BareFinder:
    """Finds files like Python, except those of hidden distributions."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in REFUSED:
            return None
        return PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(context: DistributionFinder.Context) -> Iterator[Distribution]:
        for found in PathFinder.find_distributions(context):
            if canonicalize_name(found.metadata["Name"]) in ADMITTED:
                yield found


sys.meta_path[sys.meta_path.index(PathFinder)] = BareFinder
