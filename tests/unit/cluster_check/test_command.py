"""`tinkercloud cluster check` without a cluster, and with files that it cannot read."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tinkercloud_api.cli import app


def check(folder: Path, *options: str, kubeconfig: str = "") -> Result:
    """Run the command with a kubeconfig; without one, there is no cluster."""
    path = folder / "kubeconfig"
    path.write_text(kubeconfig)
    return CliRunner().invoke(app, ["cluster", "check", *options], env={"KUBECONFIG": str(path)})


@pytest.mark.parametrize("kubeconfig", ["", "text", "a: ["])
def test_without_a_cluster_the_only_result_says_where_credentials_are_expected(
    tmp_path: Path, kubeconfig: str
) -> None:
    result = check(tmp_path, "--json", kubeconfig=kubeconfig)

    assert result.exit_code == 1
    [row] = json.loads(result.stdout)
    assert (row["check"], row["result"]) == ("cluster", "problem")
    assert "set KUBECONFIG to the path of a kubeconfig" in row["detail"]
    assert row["remedy"].startswith("set KUBECONFIG to the kubeconfig of a cluster")


def test_a_kubeconfig_that_does_not_exist_is_named_and_nothing_else_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = str(tmp_path / "missing")

    result = CliRunner().invoke(app, ["cluster", "check"], env={"KUBECONFIG": missing})

    assert result.exit_code == 1
    assert f"cluster: KUBECONFIG names {missing}, which does not exist" in result.stdout
    assert "Config not found" not in caplog.text


def test_a_cluster_that_does_not_answer_is_named_with_the_request(tmp_path: Path) -> None:
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "clusters": [cluster],
        "contexts": [context],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }

    result = check(tmp_path, kubeconfig=json.dumps(config))

    assert result.exit_code == 1
    assert "problem  cluster: Kubernetes does not answer GET /version" in result.stdout
    assert "\n         -> set KUBECONFIG" in result.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read"), ("a: [", "is not YAML"), (b"\xff\xfe\x00", "is not YAML")],
)
def test_a_values_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: str | bytes | None, words: str
) -> None:
    file = tmp_path / "values.yaml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    result = check(tmp_path, f"--values={file}")

    assert result.exit_code == 1
    message = " ".join(result.output.split())
    assert "error: --values:" in message
    assert words in message
