"""Aliases of BaseModels."""

from types import SimpleNamespace

from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.cluster.session_status import read_base_model


def test_aliases_apply_to_the_base_models_that_exist_now() -> None:
    manifest = {
        "metadata": {"name": "tiny", "resourceVersion": "1"},
        "spec": {
            "modelName": "tiny/llama",
            "source": {"hub": "tiny/llama"},
            "maxContextLength": 512,
            "head": {"image": "head"},
        },
    }
    existing = [read_base_model(manifest)]
    aliases = {"Qwen/Qwen3-8B": "tiny/llama", "Qwen/Qwen3-14B": "not-yet"}
    provider = KubernetesProvider("default", None, aliases)
    provider._base_models = SimpleNamespace(objects=existing.copy)  # type: ignore[assignment]

    (model,) = provider.models()

    assert model.names == ("tiny/llama", "Qwen/Qwen3-8B")
