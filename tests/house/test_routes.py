"""The printed route table is the committed one, so that no route appears or changes unnoticed."""

import importlib.util
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "tests" / "house" / "routes.txt"


def printed() -> str:
    spec = importlib.util.spec_from_file_location("routes", ROOT / "tools" / "routes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.text())


def test_the_routes_are_those_of_the_committed_table() -> None:
    found, committed = printed().splitlines(), COMMITTED.read_text().splitlines()

    changed = sorted({*found} ^ {*committed})
    assert changed == [], "check AUTHENTICATION, then: make routes > tests/house/routes.txt"
    assert found == committed


def test_each_way_of_authentication_has_as_many_routes_as_before() -> None:
    api_server, head, operator = COMMITTED.read_text().split("\n\n")

    def count(table: str) -> Counter[str]:
        lines = table.splitlines()
        start, end = lines[1].index("AUTHENTICATION"), lines[1].index("BODY")
        return Counter(line[start:end].strip() for line in lines[2:])

    assert count(api_server) == {
        "key": 112,
        "admin key": 16,
        "signed URL": 4,
        "none": 13,
        "login": 4,
        "browser session": 38,
    }
    assert count(head) == {"token": 41, "none": 3}
    assert count(operator) == {"none": 3}
