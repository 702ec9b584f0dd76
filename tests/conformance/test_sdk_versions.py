"""Three SDK versions, in environments of their own, do what docs/compatibility.md states.

They are the oldest one, which sends JSON; one that sends protobuf because the server asks for it;
and the newest. `make compatibility` repeats this with all versions.
"""

import json
from pathlib import Path

import pytest

from tinkercloud_testing.models import save, tiny_llama
from tinkercloud_testing.sdk_versions import MODEL, RESULTS, SETTINGS, exercise
from tinkercloud_testing.servers import a_server

VERSIONS = ["0.16.1", "0.24.1", "0.38.0"]


@pytest.mark.slow
def test_sdk_versions_do_what_the_page_states(tmp_path: Path) -> None:
    stated = json.loads(RESULTS.read_text())["versions"]
    models = {MODEL: save(tiny_llama(), tmp_path / "llama")}

    with a_server(tmp_path / "state", models, SETTINGS) as server:
        found = exercise(VERSIONS, server, tmp_path)

    differences = {
        (version, method): (stated[version].get(method), result)
        for version in VERSIONS
        for method, result in found[version].items()
        if result != stated[version].get(method)
    }
    assert differences == {}
