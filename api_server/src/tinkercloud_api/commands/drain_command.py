"""`tinkercloud drain`: moves all sessions off a node, before maintenance."""

import asyncio
import logging
from typing import TYPE_CHECKING, Annotated

import typer

from tinkercloud_api.commands.common.shared import fail, read_settings, say_line

if TYPE_CHECKING:
    from tinkercloud_api.admin.draining import Progress

_FIELD_MANAGER = "tinkercloud-drain"
"""Not the API server's, whose writes count as use of a session."""


def drain_node(
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Namespace of the sessions. Default: the namespace setting.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        int,
        typer.Option(
            min=1, help="Seconds to wait. Sessions that have been asked to leave do so later."
        ),
    ] = 3600,
    *,
    cordons: Annotated[bool, typer.Option("--cordon", help="Cordon the node first.")] = False,
) -> None:
    """Move all sessions off a cordoned node, with their state, and wait until they have left.

    Uses the cluster of KUBECONFIG. Exits with status 1 if sessions remain on the node.
    """
    import structlog

    from tinkercloud_api.admin.draining import CannotDrain
    from tinkercloud_kube.errors import KubernetesError

    where = namespace or read_settings().namespace
    # The informers' log would appear among the progress.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    left: dict[str, Progress] = {}
    try:
        asyncio.run(_run(node, where, timeout, left, cordons=cordons))
    except TimeoutError:
        states = (f"{each.session}: {each.state}" for each in left.values() if not each.has_left)
        fail(f"not all sessions have left {node} after {timeout} s; {'; '.join(states)}")
    except (CannotDrain, KubernetesError) as error:
        fail(str(error))
    typer.echo(f"no session of namespace {where} has pods on {node}")


async def _run(
    node: str, namespace: str, seconds: int, left: dict[str, "Progress"], *, cordons: bool
) -> None:
    from tinkercloud_api.admin.draining import cordon, drain
    from tinkercloud_kube.client import Client

    cluster = await Client.connect(namespace, _FIELD_MANAGER)
    try:
        async with asyncio.timeout(seconds):
            if cordons:
                await cordon(cluster, node)
            async for progress in drain(cluster, node):
                left[progress.session] = progress
                say_line(f"{progress.session}: {progress.state}")
    finally:
        await cluster.close()
