"""Every place that rejects an unknown base model reports it with the same message."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.providers.base import Placement, ServedModel, unknown_base_model
from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.local.local_provider import LocalProvider
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, WireError

UNKNOWN = Placement("s:train:0", "me", "unknown", ModelSpec(owner="me", lora=None))


def local(tmp_path: Path) -> LocalProvider:
    models = [ServedModel("tiny/a", 128), ServedModel("tiny/b", 128)]
    return LocalProvider(models, Settings(state_dir=tmp_path))


def kubernetes() -> KubernetesProvider:
    """Return a provider in a namespace without BaseModels."""
    provider = KubernetesProvider("default", None)
    provider._base_models = SimpleNamespace(objects=list)  # type: ignore[assignment]
    return provider


def test_the_message_lists_the_served_base_models(tmp_path: Path) -> None:
    message = unknown_base_model("unknown", local(tmp_path).models())

    assert message == (
        "base_model 'unknown' is not served here; served base models: 'tiny/a', 'tiny/b'"
    )


@pytest.mark.parametrize(
    ("rejected", "kind"),
    [
        (lambda: kubernetes().admit(UNKNOWN), InvalidRequest),
        (lambda: kubernetes()._create(UNKNOWN), NotFound),
    ],
)
async def test_kubernetes_rejects_unknown_base_models(
    rejected: Callable[[], Awaitable[object]], kind: type[WireError]
) -> None:
    with pytest.raises(kind) as error:
        await rejected()

    assert error.value.message == unknown_base_model("unknown", [])


async def test_the_local_provider_and_new_runs_reject_unknown_base_models(tmp_path: Path) -> None:
    provider = local(tmp_path)
    runs = TrainingRuns(
        cast("Catalog", None), provider, cast("Checkpoints", None), cast("HeadLocator", None)
    )

    with pytest.raises(NotFound) as of_provider:
        await provider.acquire(UNKNOWN)
    with pytest.raises(InvalidRequest) as of_run:
        runs.served("unknown")

    messages = {of_provider.value.message, of_run.value.message}
    assert messages == {unknown_base_model("unknown", provider.models())}
