"""The pages of the console with many runs."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(120)


async def test_no_page_but_a_search_reads_a_table_whole(
    benchmarks: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    measured = await benchmarks("console_pages").measure(tmp_path, runs=30, points=2)

    whole = {path: page["tables_read_whole"] for path, page in measured["pages"].items()}
    assert set(whole.pop("/console/runs?search=s9")) == {"sessions", "training_runs"}
    assert set(map(tuple, whole.values())) == {()}
