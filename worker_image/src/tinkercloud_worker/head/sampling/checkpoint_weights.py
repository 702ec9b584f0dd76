"""Reads the weights of a checkpoint for a sampling session."""

import asyncio

from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest, base_mismatch
from tinkercloud_protocol.heads.launch import SamplerSpec
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.model import imported_weights


async def read_to_sample(backend: Backend, spec: SamplerSpec, uri: str) -> tuple[WeightsCopy, int]:
    """Return the weights of a checkpoint, and the number of optimizer steps they have taken.

    Args:
        backend: the parts of the head.
        spec: of the session, which may name the time when the checkpoint was saved.
        uri: path of the checkpoint.

    Raises:
        InvalidRequest: it can't be read, is of another base model, or was replaced.
    """
    store, path = backend.store, CheckpointPath.parse(uri)
    path.require_loadable()
    manifest = await store.manifest(path)
    _check_matches(manifest, spec, backend)
    manifest, files = await store.read(manifest.path, formats.files_of_weights(manifest))
    # The checkpoint may have been replaced meanwhile.
    _check_matches(manifest, spec, backend)
    config = backend.config
    read = await asyncio.to_thread(formats.decode_to_sample, manifest, files, config.trainer.dtype)
    weights = await asyncio.to_thread(imported_weights.complete, manifest, read, config.model.path)
    return weights, manifest.step


def _check_matches(manifest: CheckpointManifest, spec: SamplerSpec, backend: Backend) -> None:
    if manifest.base_model != backend.config.model.name:
        raise InvalidRequest(
            f"{spec.model_path} was trained on {manifest.base_model!r}, but this server serves"
            f" {backend.config.model.name!r}"
        )
    mismatch = base_mismatch(manifest, backend.base_fingerprint)
    if mismatch is not None:
        raise InvalidRequest(f"{spec.model_path} can't be sampled from: {mismatch}")
    if spec.saved_at not in {None, manifest.created_at}:
        raise InvalidRequest(
            f"the weights of this sampling session are gone: {spec.model_path}, saved at"
            f" {spec.saved_at}, was deleted or overwritten by a checkpoint saved at"
            f" {manifest.created_at}; create a new sampling client"
        )
