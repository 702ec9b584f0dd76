"""The mirror of tokenizers answers the hub's own client as the hub does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import ServedModel
from tinkercloud_api.routes.models import hub_mirror
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_api.web import error_handlers
from tinkercloud_testing.serving.providers import OneHead

MODEL = "acme/tiny"
TEMPLATES = {"additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"}
FILES = {"config.json", "tekken.json", "tokenizer_config.json", *TEMPLATES}
OTHERS = {"model.safetensors", "additional_chat_templates/secret.txt", "other/x.jinja"}


class _Provider(OneHead):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def models(self) -> list[ServedModel]:
        return [ServedModel(MODEL, 4096, local_path=str(self._folder))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for name in FILES | OTHERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    return folder


@pytest.fixture
async def endpoint(folder: Path, tmp_path: Path) -> AsyncIterator[str]:
    """Serve the mirror on a port, and return the URL that clients use as the hub's."""
    settings = Settings(state_dir=tmp_path / "state", bootstrap_key="tml-a-key-of-these-tests")
    (tmp_path / "state").mkdir()
    async with running_context(settings, _Provider(folder)) as known:
        api = FastAPI(openapi_url=None)
        api.include_router(hub_mirror.router)
        error_handlers.install(api)
        api.state.context = known
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(api, log_config=None))
        # Connections that come before it has started wait in the listener's queue.
        serving = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/hf"
        server.should_exit = True
        await serving


async def call(function: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
    return await asyncio.to_thread(function, *arguments, **fields)


async def test_only_the_revision_that_is_served_is_found(endpoint: str, tmp_path: Path) -> None:
    hub_of = HfApi(endpoint=endpoint)
    commit = (await call(hub_of.model_info, MODEL)).sha
    fields: dict[str, Any] = {"endpoint": endpoint, "cache_dir": tmp_path / "cache"}

    for served in ("main", commit):
        assert (await call(hub_of.model_info, MODEL, revision=served)).sha == commit
        files = await call(hub_of.list_repo_files, MODEL, revision=served)
        assert set(files) == FILES
        path = await call(hf_hub_download, MODEL, "tekken.json", revision=served, **fields)
        assert Path(path).read_text() == "content of tekken.json"
    for pinned in (
        "v1.0",
        commit[:-1] + ("0" if commit[-1] != "0" else "1"),
        "refs/pr/1",
        "0" * 40,
    ):
        for ask, arguments in (
            (hub_of.model_info, {}),
            (hub_of.list_repo_files, {}),
            (lambda name, revision: list(hub_of.list_repo_tree(name, revision=revision)), {}),
            (hf_hub_download, {"filename": "tekken.json", **fields}),
            (snapshot_download, fields),
        ):
            with pytest.raises(RevisionNotFoundError):
                await call(ask, MODEL, revision=pinned, **arguments)


async def test_named_chat_templates_are_served_and_listed(endpoint: str, tmp_path: Path) -> None:
    hub_of = HfApi(endpoint=endpoint)

    folder = await call(snapshot_download, MODEL, endpoint=endpoint, cache_dir=tmp_path / "cache")
    listed = await call(
        lambda: {each.path for each in hub_of.list_repo_tree(MODEL, "additional_chat_templates")}
    )
    root = await call(lambda: {each.path for each in hub_of.list_repo_tree(MODEL)})
    everything = await call(
        lambda: {each.path for each in hub_of.list_repo_tree(MODEL, recursive=True)}
    )

    found = {each.relative_to(folder).as_posix() for each in Path(folder).rglob("*.*")}
    assert found == FILES
    assert listed == TEMPLATES
    assert root == FILES - TEMPLATES | {"additional_chat_templates"}
    assert everything == FILES | {"additional_chat_templates"}


async def test_other_files_folders_and_models_are_not_found(endpoint: str, tmp_path: Path) -> None:
    hub_of, fields = HfApi(endpoint=endpoint), {"endpoint": endpoint, "cache_dir": tmp_path / "c"}

    for name in (*OTHERS, "nothing.json"):
        with pytest.raises(EntryNotFoundError):
            await call(hf_hub_download, MODEL, name, **fields)
    with pytest.raises(EntryNotFoundError):
        await call(lambda: list(hub_of.list_repo_tree(MODEL, "other")))
    with pytest.raises(RepositoryNotFoundError):
        await call(hub_of.model_info, "acme/unknown", revision="v1.0")


async def test_a_file_that_the_client_has_is_not_sent_again(endpoint: str, folder: Path) -> None:
    url = f"{endpoint}/{MODEL}/resolve/main/tekken.json"
    async with httpx.AsyncClient() as client:
        first = await client.get(url)
        etag = first.headers["etag"]
        for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            for method in ("GET", "HEAD"):
                again = await client.request(method, url, headers={"If-None-Match": known})
                assert (again.status_code, again.content) == (304, b"")
                assert again.headers["etag"] == etag
        other = await client.get(url, headers={"If-None-Match": '"other"'})
        (folder / "tekken.json").write_text("changed")
        changed = await client.get(url, headers={"If-None-Match": etag})

    assert (other.status_code, other.text) == (200, "content of tekken.json")
    assert (changed.status_code, changed.text) == (200, "changed")
