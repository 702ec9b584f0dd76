"""URLs of checkpoints' files: whole files, ranges, archives, and every reason to refuse one."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import obstore
import pytest
from pydantic import SecretStr

from tinkercloud_api.access.auth import hash_key, new_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.context import Context
from tinkercloud_api.serve.api_app import Application
from tinkercloud_api.transfers.downloads import Content, Downloads
from tinkercloud_api.transfers.signed_urls import Grant, microseconds
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.asgi import Message, Receive, Scope, Send
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.storage.buckets import Bucket, a_bucket
from tinkercloud_worker.checkpoints.store import CheckpointStore

KEY = "tml-0123456789abcdefghijklmnopqrstuv"
RUN = "s:train:0"
WEIGHTS = bytes(range(256)) * 20_000
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
EXTERNAL = CheckpointPath(RUN, CheckpointKind.EXTERNAL, "x")


class Server:
    """An application in this process, with its store."""

    def __init__(self, settings: Settings) -> None:
        self._app = Application(settings, OneHead())
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self._app), base_url="http://where.example:81"
        )
        self.objects = open_store(settings.checkpoint_url)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Server"]:
        """Run it for the duration of the context."""
        events, started = asyncio.Queue[Message](), asyncio.Event()

        async def send(_message: Message) -> None:
            started.set()

        serving = asyncio.create_task(self._app({"type": "lifespan"}, events.get, send))
        events.put_nowait({"type": "lifespan.startup"})
        await started.wait()
        try:
            yield self
        finally:
            events.put_nowait({"type": "lifespan.shutdown"})
            await serving

    async def serve(self, url: str, receive: Receive, send: Send) -> None:
        """Serve one GET request."""
        parts = urlsplit(url)
        scope: Scope = {
            "type": "http",
            "method": "GET",
            "path": unquote(parts.path),
            "query_string": parts.query.encode(),
            "headers": [],
        }
        await self._app(scope, receive, send)

    async def save(
        self,
        path: CheckpointPath = EXTERNAL,
        files: dict[str, bytes] = FILES,
        **fields: object,
    ) -> CheckpointManifest:
        """Write a checkpoint, as a head does."""
        known: dict[str, object] = {
            "tinker_path": str(path),
            "owner": "bootstrap",
            "base_model": "m",
            "lora": None,
            "step": 1,
            "created_at": datetime.now(UTC),
            "files": {},
        }
        manifest = CheckpointManifest.model_validate(known | fields)
        return await CheckpointStore(self.objects).write(manifest, files, overwrite=True)

    @property
    def context(self) -> Context:
        """The components of the server."""
        assert self._app.context is not None
        return self._app.context

    @property
    def downloads(self) -> Downloads:
        """The component that reads files."""
        return self.context.downloads

    async def content(self, manifest: CheckpointManifest) -> Content:
        """Return the content of a checkpoint's weights."""
        saved = microseconds(manifest.created_at)
        grant = Grant(manifest.path, "adapter_model.safetensors", saved, "bootstrap", 1)
        return await self.downloads.content(grant)

    async def new_key(self, owner: str) -> str:
        """Return a key of a user."""
        key = new_key()
        await self.context.catalog.add_key(
            key_hash=hash_key(key), name=owner, owner=owner, role=Role.USER
        )
        return key

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """Send a request with a key."""
        return await self.http.get(path, headers={"X-API-Key": KEY, **headers})

    async def urls(self, **headers: str) -> dict[str, str]:
        """Return the URLs of external weights."""
        answer = await self.get(f"{where(EXTERNAL)}/external_weights_urls", **headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["urls"])


def where(path: CheckpointPath) -> str:
    return f"/api/v1/training_runs/{path.run_id}/checkpoints/{path.checkpoint_id}"


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(state_dir=folder, bootstrap_key=SecretStr(KEY), **more)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with Server(settings(tmp_path)).running() as running:
        yield running


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with a_bucket("127.0.0.1") as running:
        yield running


async def test_each_file_can_be_downloaded_by_its_url_without_a_key(server: Server) -> None:
    await server.save()

    answer = await server.get(f"{where(EXTERNAL)}/external_weights_urls")

    urls, expires = answer.json()["urls"], datetime.fromisoformat(answer.json()["expires"])
    assert timedelta(minutes=59) < expires - datetime.now(UTC) <= timedelta(hours=1)
    assert answer.headers["cache-control"] == "no-store"
    assert set(urls) == set(FILES)
    for name, url in urls.items():
        got = await server.http.get(url)
        assert (got.status_code, got.content) == (200, FILES[name])
        assert got.headers["content-length"] == str(len(FILES[name]))
        head = await server.http.head(url)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(FILES[name]))
        assert head.headers["etag"] == got.headers["etag"]


async def test_a_download_can_be_resumed_if_the_file_is_the_same(server: Server) -> None:
    await server.save()
    url = (await server.urls())["adapter_model.safetensors"]
    etag = (await server.http.head(url)).headers["etag"]

    async def get(value: str, **more: str) -> httpx.Response:
        return await server.http.get(url, headers={"Range": value, **more})

    rest = await get("bytes=3000001-", **{"If-Range": etag})
    last = await get("bytes=-10")
    other = await get("bytes=3000001-", **{"If-Range": '"another"'})
    beyond = await get(f"bytes={len(WEIGHTS)}-")
    current = await get("bytes=0-", **{"If-None-Match": f'"x", W/{etag}'})
    changed = await get("bytes=0-9", **{"If-None-Match": '"x"'})

    assert (rest.status_code, rest.content) == (206, WEIGHTS[3_000_001:])
    assert rest.headers["content-range"] == f"bytes 3000001-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"
    assert (last.status_code, last.content) == (206, WEIGHTS[-10:])
    assert (other.status_code, other.content) == (200, WEIGHTS)
    assert (current.status_code, current.content) == (304, b"")
    assert changed.status_code == 206
    assert beyond.status_code == 416
    assert beyond.headers["content-range"] == f"bytes */{len(WEIGHTS)}"


async def test_an_archive_holds_the_weights_and_a_mark_of_completeness(server: Server) -> None:
    training = CheckpointPath(RUN, CheckpointKind.TRAINING, "step-1")
    await server.save(training, {**FILES, "optimizer.safetensors": b"o"})

    answer = await server.get(f"{where(training)}/archive", Accept="application/json")

    url = answer.json()["url"]
    whole = await server.http.get(url)
    assert answer.status_code == 200
    assert whole.headers["content-length"] == str(len(whole.content))
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as archive:
        contents = {each.name: archive.extractfile(each) for each in archive}
        read = {name: content.read() for name, content in contents.items() if content}
    assert read == {**FILES, "checkpoint_complete": b""}
    part = await server.http.get(url, headers={"Range": "bytes=300-5000000"})
    assert (part.status_code, part.content) == (206, whole.content[300:5_000_001])


@pytest.mark.parametrize(
    "accepted",
    # SDK 0.16 sends both headers.
    [
        ("application/x-tar",),
        ("application/json", "application/gzip"),
        ("a/b, application/tar;q=1",),
    ],
)
async def test_a_client_that_accepts_archives_is_redirected_to_one(
    server: Server, accepted: tuple[str, ...]
) -> None:
    await server.save()
    headers = [("X-API-Key", KEY), *(("Accept", each) for each in accepted)]

    answer = await server.http.get(f"{where(EXTERNAL)}/archive", headers=headers)

    assert answer.status_code == 302
    assert answer.headers["expires"].endswith("GMT")
    assert (await server.http.get(answer.headers["location"])).status_code == 200


async def test_a_changed_url_is_refused_with_a_reason(server: Server) -> None:
    await server.save()
    url = (await server.urls())["adapter_config.json"]

    for changed in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("/x/", "/y/"),
        url.replace("owner=bootstrap", "owner=alice"),
        url.replace("expires=1", "expires=2"),
        url.replace("saved=", "saved=1"),
        url[:-1] + ("0" if url[-1] != "0" else "1"),
    ):
        answer = await server.http.get(changed)
        assert answer.status_code == 403
        assert "signature: does not match this URL" in answer.json()["detail"]
    for broken, reason in (
        (url.partition("?")[0], "owner: Field required"),
        (url.replace("saved=", "saved=x"), "saved: Input should be a valid integer"),
        (url.replace("external_weights", "secrets"), "checkpoint kind 'secrets' is unknown"),
    ):
        answer = await server.http.get(broken)
        assert answer.status_code == 400
        assert reason in answer.json()["detail"]


async def test_the_url_of_a_deleted_expired_or_replaced_checkpoint_is_dead(server: Server) -> None:
    await server.save()
    url = (await server.urls())["adapter_config.json"]

    await server.save(created_at=datetime.now(UTC) + timedelta(seconds=1))
    replaced = await server.http.get(url)
    await server.save(expires_at=datetime.now(UTC) + timedelta(seconds=60))
    fresh = (await server.urls())["adapter_config.json"]
    assert (await server.http.get(fresh)).status_code == 200
    deleted = await server.http.delete(where(EXTERNAL), headers={"X-API-Key": KEY})
    assert deleted.status_code == 200
    gone = await server.http.get(fresh)

    assert (replaced.status_code, gone.status_code) == (410, 404)
    assert "was replaced after this URL was signed" in replaced.json()["detail"]
    assert f"checkpoint {EXTERNAL} does not exist" in gone.json()["detail"]
    assert (await server.get(f"{where(EXTERNAL)}/external_weights_urls")).status_code == 404


async def test_a_damaged_file_is_not_sent(server: Server) -> None:
    manifest = await server.save()
    url = (await server.urls())["adapter_model.safetensors"]
    await obstore.put_async(server.objects, manifest.key_of("adapter_model.safetensors"), b"short")

    answer = await server.http.get(url)

    assert answer.status_code == 404
    assert "adapter_model.safetensors is damaged in the store" in answer.json()["detail"]


async def test_other_owners_get_no_urls_unless_the_checkpoint_is_public(server: Server) -> None:
    await server.save()
    alice = {"X-API-Key": await server.new_key("alice")}
    calls = [f"{where(EXTERNAL)}/{call}" for call in ("external_weights_urls", "archive")]

    private = [await server.get(call, **alice) for call in calls]
    without_key = [await server.http.get(call) for call in calls]
    await server.http.post(f"{where(EXTERNAL)}/publish", headers={"X-API-Key": KEY})
    public = await server.urls(**alice)

    assert [answer.status_code for answer in private] == [404, 404]
    assert [answer.status_code for answer in without_key] == [401, 401]
    assert "owner=alice" in public["adapter_config.json"]
    assert (await server.http.get(public["adapter_config.json"])).content == b"{}"


async def test_only_external_weights_have_urls_of_single_files(server: Server) -> None:
    training = CheckpointPath(RUN, CheckpointKind.TRAINING, "y")
    await server.save(training)

    answer = await server.get(f"{where(training)}/external_weights_urls")

    assert answer.status_code == 400
    assert "is not external weights; save_weights_external" in answer.json()["detail"]


async def test_a_file_of_any_size_is_read_in_small_parts(server: Server) -> None:
    content = await server.content(await server.save())

    parts = [part async for part in await server.downloads.open(content, range(content.size))]

    assert max(len(part) for part in parts) <= 2 << 20 < content.size
    assert b"".join(parts) == WEIGHTS


async def test_a_file_that_is_replaced_during_a_download_is_never_mixed(server: Server) -> None:
    key = (await server.save()).key_of("adapter_model.safetensors")
    url = (await server.urls())["adapter_model.safetensors"]
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 2:
            await obstore.put_async(server.objects, key, WEIGHTS[::-1])

    await server.serve(url, receive, send)

    # The response stays incomplete, so the client knows.
    start, *bodies = sent
    assert start["status"] == 200
    assert all(message["more_body"] for message in bodies)
    content = b"".join(message["body"] for message in bodies)
    assert content == WEIGHTS[: len(content)]
    assert 0 < len(content) < len(WEIGHTS)


async def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    await server.save()
    url = (await server.urls())["adapter_model.safetensors"]
    slow, left = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            slow.set()
            await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as clients:
        for _ in range(4):
            clients.create_task(server.serve(url, receive, send))
        await slow.wait()
        further = clients.create_task(server.http.get(url))
        left.set()

        assert (await further).content == WEIGHTS


async def test_a_store_that_signs_urls_sends_the_files_itself(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    root = "s3://models/checkpoints"
    own = settings(tmp_path, checkpoint_root=root, downloads={"source": "store"})
    async with Server(own).running() as server:
        await server.save()
        urls = await server.urls()

    assert all(url.startswith(bucket.endpoint) for url in urls.values())
    async with httpx.AsyncClient() as client:
        for name, url in urls.items():
            assert (await client.get(url)).content == FILES[name]


async def test_the_server_streams_from_an_object_store(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    own = settings(tmp_path, checkpoint_root="s3://models/checkpoints")
    async with Server(own).running() as server:
        await server.save()
        # `auto`: the store is at a configured address, where clients may not reach it.
        url = (await server.urls())["adapter_model.safetensors"]
        part = await server.http.get(url, headers={"Range": "bytes=1000000-4000000"})

    assert url.startswith("http://where.example:81/downloads/")
    assert (part.status_code, part.content) == (206, WEIGHTS[1_000_000:4_000_001])


async def test_urls_refer_to_where_the_client_sent_its_request(server: Server) -> None:
    await server.save()
    forwarded = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "tinker.example.com"}
    invalid = {"X-Forwarded-Proto": "ftp", "X-Forwarded-Host": "a/../b?c"}

    for headers, expected in (
        ({}, "http://where.example:81/downloads/"),
        (forwarded, "https://tinker.example.com/downloads/"),
        (invalid, "http://where.example:81/downloads/"),
    ):
        assert all(url.startswith(expected) for url in (await server.urls(**headers)).values())


async def test_urls_are_valid_for_all_servers_of_a_catalog_and_after_a_restart(
    tmp_path: Path,
) -> None:
    async with Server(settings(tmp_path)).running() as first:
        await first.save()
        url = (await first.urls())["adapter_config.json"]
    async with Server(settings(tmp_path, public_url="https://a.example/b/")).running() as second:
        got = await second.http.get(url)
        public = (await second.urls())["adapter_config.json"]
    key = {"signing_key": SecretStr("0123456789abcdef" * 2), "url_seconds": 60}
    async with Server(settings(tmp_path, downloads=key)).running() as third:
        refused = await third.http.get(url)

    assert (got.status_code, refused.status_code) == (200, 403)
    assert public.startswith("https://a.example/b/downloads/")


@pytest.mark.parametrize(
    "url", ["ftp://a.example", "a.example", "https://", "https://a b", "https://me@a", "x http://a"]
)
def test_an_address_that_is_none_is_rejected(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="is not an address that begins with http:// or https://"):
        settings(tmp_path, public_url=url)


@pytest.mark.parametrize("key", ["short", "a" * 40])
def test_a_key_that_can_be_guessed_is_rejected_without_showing_it(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match=r"downloads\.signing_key") as error:
        settings(tmp_path, downloads={"signing_key": SecretStr(key)})

    assert key not in str(error.value)
