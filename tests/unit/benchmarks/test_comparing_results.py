"""`make bench-compare` and the comparison with another server."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from tinkercloud_testing.serving.servers import API_KEY, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama


@pytest.fixture
def compare(
    benchmarks: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return the command, called with arguments."""

    def run(*files: str) -> None:
        monkeypatch.setattr(sys, "argv", ["compare", *files])
        benchmarks("compare").main()

    return run


def a_result(file: Path, values: Mapping[str, tuple[float, str]]) -> str:
    """Write a result: value and target by id."""
    rows = [
        {"id": name, "what": "x", "value": value, "unit": "ms", "wanted": wanted}
        for name, (value, wanted) in values.items()
    ]
    file.write_text(json.dumps({"measurements": rows}))
    return str(file)


def test_what_became_worse_is_named_and_ends_the_command_with_an_error(
    compare: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = a_result(tmp_path / "a.json", {"C1": (10, ">= 1"), "C2": (10, "<= 1"), "C9": (1, "")})
    after = a_result(tmp_path / "b.json", {"C1": (8, ">= 1"), "C2": (8, "<= 1")})

    with pytest.raises(SystemExit, match="1 figures are worse by more than 10%"):
        compare(before, after)

    printed = capsys.readouterr().out
    assert [line.split()[-2] for line in printed.splitlines() if "C1" in line] == ["worse"]
    assert [line.split()[-2] for line in printed.splitlines() if "C2" in line] == ["better"]
    assert "not measured any more: C9 x" in printed


def test_equal_results_are_no_regression(compare: Callable[..., None], tmp_path: Path) -> None:
    same = a_result(tmp_path / "a.json", {"C1": (10, ">= 1"), "C2": (0, "<= 1")})

    compare(same, same)


def test_a_file_that_is_no_result_is_named(compare: Callable[..., None], tmp_path: Path) -> None:
    missing = str(tmp_path / "none.json")

    with pytest.raises(SystemExit, match=r"none\.json is no result of `make bench`"):
        compare(missing, missing)
    with pytest.raises(SystemExit, match="name two results"):
        compare(missing)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.long
def test_this_server_is_compared_with_another_tinker_server(
    benchmarks: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tiny_llama(), tmp_path / "model")
    with a_server(tmp_path / "state", {"tiny/peer": model}) as other:
        monkeypatch.setenv("PEER_URL", other.url)
        monkeypatch.setenv("PEER_API_KEY", API_KEY)
        monkeypatch.setenv("PEER_MODEL", "tiny/peer")

        measured = list(benchmarks("suites.peer").measure(str(model)))

    assert [each.id for each in measured] == ["P1", "P2"]
    assert all(each.value > 0 for each in measured)
