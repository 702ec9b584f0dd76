"""How long a client waits for a run on a warm pool: from `create_model` until the run is ready.

`python -m benchmarks.cluster.pool_ready`, by hand: it needs the programs of the test cluster (`make
cluster-programs`). Real are etcd, the API server of Kubernetes, our own with PostgreSQL, the SDK, a
head with a tiny model, and the operator's worker that places runs; no pods are started.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import tinker

from tinkercloud_testing.cluster.controllers.pool_worker import a_pool_worker
from tinkercloud_testing.cluster.image_build.programs import state_folder
from tinkercloud_testing.cluster.kube_api.control_plane import a_control_plane
from tinkercloud_testing.cluster.provider_world import World, a_base_model, a_world
from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/warm"
RUNS = 100


def main() -> None:
    with state_folder() as folder, a_control_plane(folder) as plane:
        world_folder = folder / "world"
        world_folder.mkdir()
        with a_world(plane.cluster, world_folder) as world, a_warm_pool(world) as server:
            seconds = ready_seconds(server.client(), RUNS)
    cuts = statistics.quantiles(seconds, n=100)
    print(
        f"{RUNS} runs, one after the other: ready after {cuts[49]:.3f} s (p50), {cuts[94]:.3f} s"
        f" (p95), {max(seconds):.3f} s (all)"
    )


@contextmanager
def a_warm_pool(world: World) -> Iterator[Server]:
    """Run an API server, and a pool with one cluster that is ready and has enough slots."""
    shared = a_base_model("warm", world.namespace, MODEL)
    pool = {"minClusters": 0, "maxClusters": 1, "slotsPerCluster": 2 * RUNS}
    shared["spec"] |= {"sharing": "Shared", "pool": pool}
    world.cluster.apply(shared)
    world.a_pool_cluster("pool-warm", world.a_head(MODEL))
    server = world.server("one")
    with a_pool_worker(world.cluster.kubeconfig, world.namespace):
        try:
            server.start()
            yield server
        finally:
            server.clients.close()
            server.stop()


def ready_seconds(client: tinker.ServiceClient, runs: int) -> list[float]:
    """Create runs, one after the other; return how long each took. The first does not count."""
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        client.create_lora_training_client(MODEL, rank=4, seed=1).result()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


if __name__ == "__main__":
    main()
