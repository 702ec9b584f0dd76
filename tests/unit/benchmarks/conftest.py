"""The benchmarks as modules."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

_ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Make `benchmarks` importable, which is not an installed package."""
    monkeypatch.syspath_prepend(_ROOT)
    return lambda name: import_module(f"benchmarks.{name}")
