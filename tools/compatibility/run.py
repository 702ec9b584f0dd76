"""Exercise SDK versions against one server, and write the results to docs/compatibility.json.

    run.py 0.16.1 0.38.0 ...    the versions to exercise

Exits with status 1 if a method fails for a reason that `tools/compatibility/page.py` does not
explain.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from page import explanation, fingerprint

from tinkercloud_testing.clients.sdk_versions import RESULTS, a_server_without_sdk, exercise


def main() -> None:
    """Exercise the versions and write the results."""
    started = time.monotonic()
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with a_server_without_sdk(folder) as server:
            found = exercise(wanted, server, folder)
    content = {"program": fingerprint(), "versions": found}
    RESULTS.write_text(json.dumps(content, indent=1, sort_keys=False) + "\n")
    unexplained = [
        f"{version}  {method}: {result}"
        for version, results in found.items()
        for method, result in results.items()
        if explanation(method, result) is None
    ]
    works = sum(result == "works" for results in found.values() for result in results.values())
    print(
        f"{works} of {sum(map(len, found.values()))} work in {len(found)} versions,"
        f" {time.monotonic() - started:.0f} s"
    )
    if unexplained:
        sys.exit("not explained:\n" + "\n".join(unexplained))


main()
