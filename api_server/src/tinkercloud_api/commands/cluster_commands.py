"""`tinkercloud cluster`: checks whether a cluster is ready for the chart."""

import asyncio
import logging
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinkercloud_api.commands.common.progress import waiting
from tinkercloud_api.commands.common.shared import Json, fail, read_settings, say_line, show

if TYPE_CHECKING:
    from tinkercloud_api.cluster_check.findings import Finding
    from tinkercloud_api.cluster_check.values import Release

app = typer.Typer(help="Check the Kubernetes cluster of KUBECONFIG.", no_args_is_help=True)

_FIELD_MANAGER = "tinkercloud-cluster-check"
_COLUMNS = ["result", "check", "detail", "remedy"]


@app.command("check")
def check_cluster(
    values: Annotated[
        list[Path] | None,
        typer.Option(
            help="File with values of the chart, as for `helm install`. Can be repeated; later"
            " files override earlier ones."
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Namespace of the release. Default: the namespace setting.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Check whether a cluster is ready for the chart, before or after `helm install`.

    Uses the cluster of KUBECONFIG with your permissions, and changes nothing. Each result is ok, a
    warning or a problem with its remedy. Exits with status 1 if there is a problem.
    """
    import structlog

    from tinkercloud_api.cluster_check.findings import Finding, Level
    from tinkercloud_api.cluster_check.values import release_of
    from tinkercloud_kube.errors import KubernetesError, NoCredentials

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    # It would log that there is no kubeconfig, which is a result of the check.
    logging.getLogger("kubernetes.aio.config").setLevel(logging.ERROR)
    release = release_of([_read(path) for path in values or []])
    where = namespace or read_settings().namespace
    try:
        findings = asyncio.run(_examine(where, release))
    except KubernetesError as error:
        remedy = "set KUBECONFIG to the kubeconfig of a cluster that answers `kubectl version`"
        detail = _missing_kubeconfig() if isinstance(error, NoCredentials) else None
        findings = [Finding("cluster", Level.PROBLEM, detail or str(error), remedy)]
    if as_json:
        show([each.as_row() for each in findings], _COLUMNS, as_json=True)
    else:
        for line in chain.from_iterable(_line(each).splitlines() for each in findings):
            say_line(line)
    if any(each.level is Level.PROBLEM for each in findings):
        raise typer.Exit(1)


async def _examine(namespace: str, release: "Release") -> "list[Finding]":
    from tinkercloud_api.cluster_check.checks import examine
    from tinkercloud_api.cluster_check.reading import read_facts
    from tinkercloud_kube.client import Client
    from tinkercloud_protocol.heads.releases import this_release

    client = await Client.connect(namespace, _FIELD_MANAGER)
    try:
        with waiting(f"asking {client.url}"):
            facts = await read_facts(client, release)
    finally:
        await client.close()
    return list(examine(facts, release, this_release()))


def _missing_kubeconfig() -> str | None:
    """Return that none of the files in KUBECONFIG exists, if so."""
    names = os.environ.get("KUBECONFIG", "")
    if not names or any(Path(each).expanduser().exists() for each in names.split(os.pathsep)):
        return None
    return f"KUBECONFIG names {names}, which does not exist"


def _line(finding: "Finding") -> str:
    """Return a result as text: its remedy is on a line of its own."""
    line = f"{finding.level.value:8} {finding.check}: {finding.detail}"
    return f"{line}\n{'':8} -> {finding.remedy}" if finding.remedy else line


def _read(path: Path) -> Any:  # noqa: ANN401 - any YAML
    """Return the content of a values file, or exit with an error that names it."""
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        fail(f"--values: cannot read {path} ({error.strerror}); name an existing file")
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"--values: {path} is not YAML: {error}")
