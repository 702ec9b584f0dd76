"""Downloads of checkpoints: their URLs, and the content that the server's own URLs refer to."""

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_api.config.sections.download_settings import DownloadSettings
from tinkercloud_api.transfers import tar_layout
from tinkercloud_api.transfers.signed_urls import Grant, UrlGone, microseconds, signed_url
from tinkercloud_api.transfers.slots import DownloadSlots
from tinkercloud_api.transfers.tar_layout import Segment, StoredObject
from tinkercloud_protocol.heads.checkpoint_manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FULL_WEIGHTS,
    CheckpointManifest,
)
from tinkercloud_protocol.responses.listings import ArchiveUrl, ExternalWeightsUrls
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Unavailable
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

log = structlog.get_logger(__name__)

_PART_BYTES = 2 << 20
"""How much of a download is in memory, apart from the buffers of its connection."""
_ARCHIVE = "checkpoint.tar"
_COMPLETE = "checkpoint_complete"
"""Empty file at the end of an archive, by which the SDK recognizes complete ones."""
_PUBLISHED = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, FULL_WEIGHTS)
"""Files of a training or sampler checkpoint that archives contain."""


@dataclass(frozen=True, slots=True)
class Content:
    """A file to download, possibly one that consists of several objects."""

    name: str
    layout: Sequence[Segment]
    etag: str
    """Strong entity tag, in quotes."""
    modified: datetime

    @property
    def size(self) -> int:
        """Size in bytes."""
        return tar_layout.total_size(self.layout)


class Downloads:
    """Signs URLs and reads what they refer to."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        objects: ObjectStoreClient,
        settings: DownloadSettings,
        key: bytes,
    ) -> None:
        """Create the component.

        Args:
            checkpoints: all checkpoints.
            objects: the store that contains their files.
            settings: the settings of downloads.
            key: the key that signs URLs, shared by all replicas.
        """
        self._checkpoints = checkpoints
        self._objects = objects
        self._settings = settings
        self.key = key
        self.slots = DownloadSlots(settings.max_concurrent_per_owner)

    async def file_urls(
        self, path: CheckpointPath, principal: Principal, base_url: str
    ) -> ExternalWeightsUrls:
        """Return a URL for each file of external weights.

        Args:
            path: the checkpoint.
            principal: the caller.
            base_url: address of this server for the caller.

        Raises:
            NotFound: the checkpoint does not exist for this principal.
            InvalidRequest: it is of another kind.
            Unavailable: the store is configured to sign URLs, and failed to.
        """
        if path.kind is not CheckpointKind.EXTERNAL:
            raise InvalidRequest(
                f"{path} is not external weights; save_weights_external(name) writes files for"
                " download"
            )
        manifest = await self._checkpoints.manifest(path, principal)
        expires = self._expiry()
        urls = await self._urls_of_store(manifest)
        if urls is None:
            urls = {
                name: self._url(manifest, name, principal, expires, base_url)
                for name in manifest.files
            }
        return ExternalWeightsUrls(urls=urls, expires=expires)

    async def archive_url(
        self, path: CheckpointPath, principal: Principal, base_url: str
    ) -> ArchiveUrl:
        """Return the URL of a checkpoint's weights as one tar file; arguments as `file_urls`.

        Raises:
            NotFound: the checkpoint does not exist for this principal.
        """
        manifest = await self._checkpoints.manifest(path, principal)
        expires = self._expiry()
        url = self._url(manifest, _ARCHIVE, principal, expires, base_url)
        return ArchiveUrl(url=url, expires=expires)

    async def content(self, grant: Grant) -> Content:
        """Return what the URL of a grant, which the caller has checked, refers to.

        Raises:
            NotFound: the checkpoint was deleted or has expired.
            UrlGone: another checkpoint was saved in its place.
        """
        manifest = await self._checkpoints.manifest_of_grant(grant.path)
        if microseconds(manifest.created_at) != grant.saved:
            raise UrlGone(
                f"checkpoint {grant.path} was replaced after this URL was signed; request a new one"
            )
        objects = {
            name: StoredObject(manifest.key_of(name), stored.size_bytes)
            for name, stored in manifest.files.items()
            if grant.path.kind is CheckpointKind.EXTERNAL or name in _PUBLISHED
        }
        if grant.file == _ARCHIVE:
            layout = tar_layout.tar({**objects, _COMPLETE: b""}, manifest.created_at)
            name = f"{grant.path.name}.tar"
            return Content(name, layout, _etag(manifest, objects), manifest.created_at)
        if grant.file not in objects:
            raise NotFound(f"checkpoint {grant.path} has no file {grant.file!r}")
        layout = [objects[grant.file]]
        return Content(grant.file, layout, _etag(manifest, [grant.file]), manifest.created_at)

    async def open(self, content: Content, part: range) -> AsyncIterator[bytes]:
        """Return the bytes of a part of a content, a few megabytes at a time.

        Raises:
            NotFound: an object is missing or damaged. Objects that change later end the iteration
                with Unavailable.
        """
        tags: dict[str, str | None] = {}
        pieces = list(tar_layout.cut(content.layout, part))
        for segment, _ in pieces:
            if isinstance(segment, StoredObject):
                found = await self._objects.describe(segment.key)
                if found is None or found.size != segment.size:
                    raise NotFound(f"{content.name} is damaged in the store; save it again")
                tags[segment.key] = found.etag
        return self._read(pieces, tags)

    async def _read(
        self, pieces: Sequence[tuple[Segment, range]], tags: Mapping[str, str | None]
    ) -> AsyncIterator[bytes]:
        for segment, within in pieces:
            if isinstance(segment, bytes):
                yield segment[within.start : within.stop]
                continue
            for start in range(within.start, within.stop, _PART_BYTES):
                stop = min(start + _PART_BYTES, within.stop)
                tag = tags[segment.key]
                yield await self._objects.read_range(segment.key, range(start, stop), tag)

    def _expiry(self) -> datetime:
        seconds = timedelta(seconds=self._settings.url_seconds)
        return now().replace(microsecond=0) + seconds

    def _url(
        self,
        manifest: CheckpointManifest,
        file: str,
        principal: Principal,
        expires: datetime,
        base_url: str,
    ) -> str:
        saved = microseconds(manifest.created_at)
        grant = Grant(manifest.path, file, saved, principal.owner, int(expires.timestamp()))
        return signed_url(base_url, self.key, grant)

    async def _urls_of_store(self, manifest: CheckpointManifest) -> dict[str, str] | None:
        """Return URLs that the store has signed; None if this server is to sign them.

        Raises:
            Unavailable: the store is configured to sign URLs, and failed to.
        """
        source = self._settings.source
        if source == "server" or (source == "auto" and not self._objects.has_public_urls):
            return None
        keys = [manifest.key_of(name) for name in manifest.files]
        try:
            urls = await self._objects.sign(keys, timedelta(seconds=self._settings.url_seconds))
        except Unavailable:
            if source == "store":
                raise
            log.warning("the store cannot sign URLs; this server signs them", of=str(manifest))
            return None
        return dict(zip(manifest.files, urls, strict=True))


def _etag(manifest: CheckpointManifest, names: Sequence[str] | Mapping[str, object]) -> str:
    digests = [f"{name} {manifest.files[name].sha256}" for name in names]
    return f'"{hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]}"'
