"""Checks that the files of a backup belong together."""

from collections.abc import Mapping
from pathlib import Path

from tinkercloud_api.admin.backup import archive
from tinkercloud_api.admin.backup.archive import Header, Manifest
from tinkercloud_api.catalog import backup as catalog_backup
from tinkercloud_api.catalog.backup import BackupError
from tinkercloud_api.catalog.schema.connection import newest_revision, unknown_revision
from tinkercloud_api.config.state_folder import VERSIONS, FolderVersion
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest, decode_manifest
from tinkercloud_protocol.heads.releases import this_release
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import MANIFEST_NAME, CheckpointPath

_MAX_MANIFEST_BYTES = 64 << 20


def check_header(header: Header, name: str) -> None:
    """Check that this release has the schema of a backup's catalog.

    Args:
        header: the header.
        name: the backup, in messages.

    Raises:
        BackupError: it has not.
    """
    unknown = unknown_revision(header.catalog_revisions)
    if unknown is not None:
        raise BackupError(
            f"the catalog of {name} has revision {unknown} (of release {header.release}), and"
            f" release {this_release()} reads revisions up to {newest_revision()}; use release"
            f" {header.release} or newer"
        )


def check_version(content: bytes, name: str) -> None:
    """Check that this release reads the state folder of a backup.

    Args:
        content: its `version.json`.
        name: the backup, in messages.

    Raises:
        BackupError: it does not.
    """
    try:
        found = FolderVersion.model_validate_json(content)
    except ValueError:
        raise BackupError(f"{name} is damaged: its {archive.VERSION} can't be read") from None
    if why := VERSIONS.refusal(f"the state folder of {name}", found.version, found.release):
        raise BackupError(why)


def is_small_manifest(name: str, size: int) -> bool:
    """Return whether a file is the manifest of a checkpoint, for `check`."""
    is_manifest = name.startswith(f"{archive.CHECKPOINTS}/") and name.endswith(f"/{MANIFEST_NAME}")
    return is_manifest and size <= _MAX_MANIFEST_BYTES


def check(manifest: Manifest, catalog: Path, manifests: Mapping[str, bytes], name: str) -> None:
    """Check the catalog of a backup, and that it has the checkpoints that its catalog names.

    Args:
        manifest: of the backup.
        catalog: a copy of its catalog.
        manifests: the contents of `is_small_manifest`, by name.
        name: the backup, in messages.

    Raises:
        BackupError: the catalog is damaged, or a checkpoint is damaged or missing that was not when
            the backup was made.
    """
    if archive.CATALOG not in manifest.files:
        raise BackupError(f"{name} is damaged: it has no {archive.CATALOG}")
    catalog_backup.check(catalog)
    if catalog_backup.revisions(catalog) != manifest.catalog_revisions:
        raise BackupError(f"{name} is damaged: its catalog is not that of its header")
    if not manifest.has_checkpoints:
        return
    for path in catalog_backup.named_checkpoints(catalog):
        why = _damage(path, manifest, manifests)
        if why is not None and str(path) not in manifest.damaged:
            raise BackupError(f"{name} is damaged: {path} is in its catalog, and {why}")


def _damage(path: CheckpointPath, manifest: Manifest, manifests: Mapping[str, bytes]) -> str | None:
    """Return what a backup lacks of a checkpoint; None if it has all of it."""
    content = manifests.get(f"{archive.CHECKPOINTS}/{path.manifest_key}")
    if content is None:
        return "not in its files"
    try:
        described = decode_manifest(CheckpointManifest, content, str(path))
    except InvalidRequest as error:
        return error.message
    for file, stored in described.files.items():
        if manifest.files.get(f"{archive.CHECKPOINTS}/{described.key_of(file)}") != stored:
            return f"its file {file} is missing or differs"
    return None
