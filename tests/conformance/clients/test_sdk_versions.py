"""Three SDK versions, in environments of their own, do what docs/compatibility.md states.

They are the oldest one, which sends JSON; one that sends protobuf because the server asks for it;
and the newest. `make compatibility` repeats this with all versions. The server cannot import any
SDK, so that none that a user installs can change it.
"""

import json
from pathlib import Path

import pytest

from tinkercloud_testing.clients.sdk_versions import RESULTS, a_server_without_sdk, exercise

VERSIONS = ["0.16.1", "0.24.1", "0.38.0"]


@pytest.mark.slow
def test_sdk_versions_do_what_the_page_states(tmp_path: Path) -> None:
    stated = json.loads(RESULTS.read_text())["versions"]

    with a_server_without_sdk(tmp_path) as server:
        found = exercise(VERSIONS, server, tmp_path)

    differences = {
        (version, method): (stated[version].get(method), result)
        for version in VERSIONS
        for method, result in found[version].items()
        if result != stated[version].get(method)
    }
    assert differences == {}
