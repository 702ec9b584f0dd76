"""Runs in several states, for the pages of the console."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, NOT_DURABLE, Server

MODEL = "tiny/llama"
ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>"
_LIMITED = "limited"
"""An owner who may have one run at a time."""
SETTINGS = {
    **NOT_DURABLE,
    "TINKERCLOUD_TENANTS": json.dumps({"few": {"owners": [_LIMITED], "limits": {"models": 1}}}),
}
"""What the server needs for these runs."""


@dataclass(frozen=True)
class Runs:
    """Ids of runs."""

    learning: str
    """Has taken three steps and has two checkpoints. Its name and that of a value that its client
    logs are `ATTACK`."""
    other: str
    """Has taken two steps."""
    lost: str
    """Its head was killed."""
    waiting: str
    """Waits until its owner has fewer runs."""


def make_runs(server: Server) -> Runs:
    """Train on a server with `SETTINGS` that serves `MODEL`."""
    lost = trained(server, MODEL, steps=1)
    server.kill_heads()
    wait_until(lambda: _state(server, lost) == "lost", "a lost run")
    learning, other = trained(server, MODEL, steps=3, name=ATTACK), trained(server, MODEL, steps=2)
    for number in range(1, 4):
        logged = {"step": number, "metrics": {ATTACK: float(number)}}
        assert server.post(f"runs/{learning}/metrics", logged).status == 200
    for name in ("first", "second"):
        assert server.post(f"runs/{learning}/save", {"name": name}).status == 200
    return Runs(learning, other, lost, _waiting(server))


def trained(
    server: Server,
    model: str,
    *,
    steps: int,
    name: str | None = None,
    learn: Callable[[tinker.TrainingClient, int], object] = lambda training, _number: step(
        training
    ),
) -> str:
    """Return the id of a run that has reported its steps.

    Args:
        server: the server.
        model: the base model.
        steps: how many steps it takes.
        name: the name of its session.
        learn: takes the step with a number, from 0 on.
    """
    client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY, display_name=name)
    server.clients.made.append(client)
    training = client.create_lora_training_client(model, rank=4).result()
    for number in range(steps):
        learn(training, number)
    wait_until(lambda: _taken(server, training.model_id) == steps, "the curve of a run")
    return str(training.model_id)


def _waiting(server: Server) -> str:
    client = server.client(server.new_key(_LIMITED))
    client.create_lora_training_client(MODEL, rank=4).result()
    _pending = client.create_lora_training_client(MODEL, rank=4)
    found: list[str] = []

    def is_waiting() -> bool:
        listed = server.request("GET", "/api/v1/runs?access_scope=accessible").json()["runs"]
        found.extend(run["run_id"] for run in listed if run["state"] == "waiting")
        return found != []

    wait_until(is_waiting, "a run that waits")
    return found[0]


def _taken(server: Server, run: str) -> int:
    points = server.request("GET", f"/api/v1/runs/{run}/curve").json()["points"]
    return sum(point["steps"] for point in points)


def _state(server: Server, run: str) -> str:
    return str(server.request("GET", f"/api/v1/runs/{run}").json()["state"])
