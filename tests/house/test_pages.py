"""What the pages of docs/ promise to tell, they tell."""

from pathlib import Path

import pytest

from tinkercloud_crds.conditions import Reason
from tinkercloud_operator.settings import ENV_PREFIX, Settings

DOCS = Path(__file__).parents[2] / "docs"
OPERATIONS = (DOCS / "operations.md").read_text()
CONFIGURATION = (DOCS / "configuration.md").read_text()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_of_a_condition_is_explained(reason: Reason) -> None:
    assert f"`{reason}`" in OPERATIONS


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_of_the_operator_is_explained(name: str) -> None:
    assert f"| `{ENV_PREFIX}{name.upper()}` |" in CONFIGURATION
