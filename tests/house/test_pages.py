"""What the pages of docs/ promise to tell, they tell."""

import re
import tomllib
from pathlib import Path

import pytest

from tinkercloud_crds.conditions import Reason
from tinkercloud_operator.settings import ENV_PREFIX, Settings

DOCS = Path(__file__).parents[2] / "docs"
OPERATIONS = (DOCS / "operate" / "operations.md").read_text()
CONFIGURATION = (DOCS / "operate" / "configuration.md").read_text()
ENGINES = (DOCS / "contribute" / "evidence.md").read_text()
LOCK = tomllib.loads((DOCS.parent / "uv.lock").read_text())


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_of_a_condition_is_explained(reason: Reason) -> None:
    assert f"`{reason}`" in OPERATIONS


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_of_the_operator_is_explained(name: str) -> None:
    assert f"| `{ENV_PREFIX}{name.upper()}` |" in CONFIGURATION


def test_what_a_gpu_is_measured_with_is_what_is_locked() -> None:
    told = dict(re.findall(r"([\w-]+)==(\S+)", ENGINES.partition("## On a GPU")[2]))
    locked = {each["name"]: each["version"] for each in LOCK["package"] if "version" in each}

    assert {"einops", "liger-kernel", "mbridge", "megatron-core"} <= told.keys()
    assert told == {name: locked[name] for name in told}
