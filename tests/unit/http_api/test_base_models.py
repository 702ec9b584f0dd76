"""Base models where the API does not decide about them, and the record of added ones."""

from pathlib import Path

import pytest

from tinkercloud_api.config import added_models
from tinkercloud_api.config.added_models import AddedModelsError
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.runs.base_models import ModelRefusedError
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_api.serve.model_download import files_of
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


def unreadable(_file: Path) -> bytes:
    raise PermissionError(13, "Permission denied", "/models/m/config.json")


@pytest.mark.parametrize(
    "config",
    [
        '{"architectures": 5}',
        '{"text_config": 1}',
        '{"model_type": ["llama"]}',
        '{"a": ' * 9999,
        None,
    ],
    ids=["architectures", "text_config", "model_type", "depth", "unreadable"],
)
def test_a_model_that_cannot_be_read_is_refused_with_its_path_whatever_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str | None
) -> None:
    (tmp_path / "config.json").write_text(config or "{}")
    if config is None:
        monkeypatch.setattr(Path, "read_bytes", unreadable)
    files = files_of(Settings(state_dir=tmp_path))

    with pytest.raises(ModelRefusedError, match=r"^model 'm': ") as refused:
        files.checked("m", str(tmp_path))

    assert str(tmp_path) in str(refused.value)
