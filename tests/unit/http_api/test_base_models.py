"""Base models where the API does not decide about them, and the record of added ones."""

from pathlib import Path

import pytest

from tinkercloud_api.config import added_models
from tinkercloud_api.config.added_models import AddedModelsError
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.providers import OneHead


async def test_heads_that_are_pods_serve_base_model_resources_only(tmp_path: Path) -> None:
    async with running_context(Settings(state_dir=tmp_path), OneHead()) as server:
        for change in (server.base_models.add("m", "m"), server.base_models.remove("tiny")):
            with pytest.raises(InvalidRequest, match=r"are BaseModel resources.*`kubectl apply`"):
                await change


@pytest.mark.parametrize("content", ["{", "[]", '{"m": 1}'])
def test_a_damaged_record_of_added_models_is_named_with_what_to_do(
    tmp_path: Path, content: str
) -> None:
    assert added_models.read(tmp_path) == {}
    added_models.write(tmp_path, {"m": "/models/ü"})
    assert added_models.read(tmp_path) == {"m": "/models/ü"}
    (tmp_path / "models.json").write_text(content)

    with pytest.raises(AddedModelsError, match=r"models\.json .*repair or delete it"):
        added_models.read(tmp_path)
