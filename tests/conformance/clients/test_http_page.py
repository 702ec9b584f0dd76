"""The examples of the page about the HTTP API, and the example script, run as they are written."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tinkercloud_testing.serving.servers import API_KEY, Server

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "use" / "http-api.md").read_text()
EXAMPLES = re.findall(r"^```sh\n(.*?)^```(?:\n\n```json\n(.*?)^```)?", PAGE, re.M | re.S)
MARK = "-- next example --"
CALLS = {
    *(
        "/health",
        "health",
        "get_server_capabilities",
        "base_models",
        "create_session",
        "session_heartbeat",
    ),
    *("sessions", "session_usage", "create_model", "get_info", "get_tokenizer", "retrieve_future"),
    *("cleanup_futures", "forward_backward", "forward", "optim_step", "save_weights"),
    *("save_weights_for_sampler", "load_weights", "weights_info", "sample", "asample"),
    *("create_sampling_client", "runs", "problems", "delete_model", "usage", "users"),
    *("projects", "audit"),
}
"""Calls that the page must have an example of."""


def run(script: str, server: Server, folder: Path) -> str:
    """Run a shell script as a user of the server; return what it prints."""
    result = subprocess.run(
        ["/bin/sh", "-eu"],
        input=script,
        env={"PATH": os.environ["PATH"], "TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def covers(actual: object, documented: object) -> bool:
    """Whether a value has all keys of the documented one."""
    if isinstance(documented, dict):
        return isinstance(actual, dict) and all(
            key in actual and covers(actual[key], value) for key, value in documented.items()
        )
    if isinstance(documented, list) and documented:
        return isinstance(actual, list) and bool(actual) and covers(actual[0], documented[0])
    return True


def test_the_examples_of_the_page_do_what_it_says(server: Server, tmp_path: Path) -> None:
    script = f"echo '{MARK}'\n".join(code for code, _ in EXAMPLES)

    outputs = run(script, server, tmp_path).split(f"{MARK}\n")

    assert len(outputs) == len(EXAMPLES)
    for (code, documented), output in zip(EXAMPLES, outputs, strict=True):
        if documented:
            assert covers(json.loads(output), json.loads(documented)), (code, output)
        else:
            assert output == "", (code, output)
    assert "model" in json.loads((tmp_path / "tokenizer.json").read_text())


def test_every_call_has_an_example() -> None:
    code = "\n".join(code for code, _ in EXAMPLES)
    called = set(re.findall(r"\$URL/(\w+)", code)) | set(
        re.findall(r"\$TINKER_BASE_URL(/\w+)\"", code)
    )

    assert called == CALLS


@pytest.mark.parametrize("script", ["curl.sh"])
def test_the_script_trains_and_samples_with_curl_alone(
    server: Server, tmp_path: Path, script: str
) -> None:
    output = run(f"exec {ROOT / 'examples' / script}", server, tmp_path)

    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert "after 40, 50, 45: 60,42,55" in output
