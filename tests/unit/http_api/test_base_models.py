"""Base models where the API does not decide about them, and the record of added ones."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.roles import Role
from tinkercloud_api.config import added_models
from tinkercloud_api.config.added_models import AddedModelsError
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import ServedModel
from tinkercloud_api.providers.local.local_provider import LocalProvider
from tinkercloud_api.runs.base_models import BaseModels, ModelFiles, ModelRefusedError
from tinkercloud_api.serve import model_download
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_api.serve.model_download import files_of
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.serving.providers import OneHead


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


ADMIN = Principal(key_id=1, key_name="admin", owner="admin", role=Role.ADMIN)


async def nothing(*_arguments: object) -> None: ...


@asynccontextmanager
async def base_models(
    settings: Settings, download: Callable[[str, str], Awaitable[None]] | None = None
) -> AsyncIterator[BaseModels]:
    """Run the base models of a server on this machine, which loads none."""
    provider = LocalProvider([ServedModel(name, 8) for name in settings.models], settings)
    files = ModelFiles(
        is_missing=lambda _name, _where: download is not None,
        download=download or nothing,
        downloaded_bytes=lambda _where: 0,
        checked=lambda name, _where: ServedModel(name, 8),
    )
    async with running_context(settings, provider) as server:
        await provider.start(nothing)
        models = BaseModels(settings, provider, server.catalog, files)
        await models.start()
        yield models
        await models.stop()
        await provider.stop()


def settings_at(state_dir: Path, **others: object) -> Settings:
    return Settings.model_validate({"state_dir": state_dir, "preload": False, **others})


async def test_a_download_that_fails_in_an_unforeseen_way_says_so(tmp_path: Path) -> None:
    async def broken(_name: str, _where: str) -> None:
        raise BlockingIOError(11, "no more processes")

    async with base_models(settings_at(tmp_path), broken) as models:
        await models.add("m", "acme/m")
        await asyncio.sleep(0)
        (listed,) = await models.listed(ADMIN)

    assert listed.state == "failed: BlockingIOError: [Errno 11] no more processes; add it again"


def test_a_download_that_fails_in_an_unforeseen_way_reports_what_was_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_models: object) -> None:
        raise AttributeError("no sibling")

    monkeypatch.setattr(sys, "argv", ["model_download", "m", "acme/m"])
    monkeypatch.setattr(model_download, "download_missing", broken)

    with pytest.raises(AttributeError):
        model_download.main()

    assert "failed (AttributeError: no sibling); add it again" in capsys.readouterr().out


def test_a_file_that_the_download_renames_does_not_break_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--acme--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "whole").write_bytes(b"1234")
    (blobs / "renamed.incomplete").symlink_to("gone")

    assert files_of(Settings(state_dir=tmp_path)).downloaded_bytes("acme/m") == 4


async def test_an_alias_is_not_removed_nor_is_the_model_that_the_next_start_needs_for_it(
    tmp_path: Path,
) -> None:
    async with base_models(settings_at(tmp_path)) as models:
        await models.add("m", "/models/m")
    aliased = settings_at(tmp_path, aliases={"gpt": "m"})

    async with base_models(aliased) as models:
        with pytest.raises(InvalidRequest, match=r"'gpt' is an alias of 'm' .*; remove 'm'"):
            await models.remove("gpt")
        with pytest.raises(InvalidRequest, match=r"'m' has aliases in the settings: 'gpt'; "):
            await models.remove("m")

    assert added_models.read(tmp_path) == {"m": "/models/m"}


async def test_removing_is_idempotent_and_says_whether_the_model_was_served(tmp_path: Path) -> None:
    async with base_models(settings_at(tmp_path)) as models:
        await models.add("m", "/models/m")
        removed = [await models.remove(name) for name in ("m", "m", "unknown")]

    assert [each.was_served for each in removed] == [True, False, False]


async def test_a_model_of_the_settings_with_a_relative_path_can_be_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()

    async with base_models(settings_at(tmp_path / "state", models={"m": "weights"})) as models:
        for place in ("weights", "./weights", str(tmp_path / "weights")):
            await models.add("m", place)
        (listed,) = await models.listed(ADMIN)

    assert listed.source == str(tmp_path / "weights")
