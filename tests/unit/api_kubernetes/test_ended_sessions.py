"""When a run is reported as lost: not before its head has saved a last checkpoint."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from tinkercloud_api.providers.base import Placement
from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.cluster.placed_sessions import PlacedSessions
from tinkercloud_api.providers.cluster.session_status import TrainingSessionView, read_session
from tinkercloud_api.providers.session_options import SessionOptions
from tinkercloud_kube.client import Client
from tinkercloud_kube.informer import Informer
from tinkercloud_protocol.wire.errors import Unavailable

SESSION = read_session(
    {
        "metadata": {
            "name": "one",
            "uid": "u",
            "resourceVersion": "1",
            "generation": 2,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"baseModel": "tiny/llama", "owner": "me"},
    }
)
RUN = Placement("s:train:0", "me", "tiny/llama", options=SessionOptions(session="one"))


def a_provider(session: TrainingSessionView) -> KubernetesProvider:
    provider = KubernetesProvider("default", None)
    sessions = cast("Informer[TrainingSessionView]", SimpleNamespace(get={"one": session}.get))
    provider._placed = PlacedSessions(cast("Client", None), sessions)
    return provider


async def test_a_run_is_not_gone_while_its_session_is_being_deleted() -> None:
    with pytest.raises(Unavailable, match="send the request again"):
        await a_provider(replace(SESSION, is_deleted=True)).is_gone(RUN)


async def test_a_run_is_gone_if_the_session_belongs_to_another_owner() -> None:
    assert await a_provider(SESSION).is_gone(replace(RUN, owner="bob"))
    assert not await a_provider(SESSION).is_gone(RUN)
