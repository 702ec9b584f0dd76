"""The size of the catalog with runs."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def test_a_catalog_grows_with_its_runs(
    benchmarks: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    module = benchmarks("catalog.catalog_size")

    assert module.size(tmp_path / "empty.db", 0) < module.size(tmp_path / "full.db", 100)
