"""Reads training checkpoints for a model."""

import asyncio
from dataclasses import dataclass, replace

from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest, base_mismatch
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.engine.trainer import Gradient, TrainingState
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.model import imported_weights


@dataclass(frozen=True, slots=True, eq=False)
class SavedModel:
    """The content of a training checkpoint."""

    state: TrainingState
    gradient: Gradient | None


async def read_checkpoint(backend: Backend, uri: str, *, with_optimizer: bool) -> SavedModel:
    """Read a checkpoint: all of it, or only its weights if `with_optimizer` is false.

    Raises:
        InvalidRequest: the path is invalid, or the checkpoint is of another base model.
    """
    store, path = backend.store, CheckpointPath.parse(uri)
    path.require_loadable()
    manifest = await store.manifest(path)
    base_model = backend.config.model.name
    if manifest.base_model != base_model:
        raise InvalidRequest(
            f"{uri} was trained on {manifest.base_model!r}, and can't be loaded into a"
            f" model of {base_model!r}"
        )
    mismatch = base_mismatch(manifest, backend.base_fingerprint)
    if mismatch is not None:
        raise InvalidRequest(f"{manifest} can't be loaded: {mismatch}")
    files_of = formats.files_of_training if with_optimizer else formats.files_of_weights
    manifest, files = await store.read(manifest.path, files_of(manifest))
    return await asyncio.to_thread(_decode, manifest, files, backend.config.model.path)


def _decode(manifest: CheckpointManifest, files: formats.Contents, base_path: str) -> SavedModel:
    state = formats.decode_state(manifest, files)
    weights = imported_weights.complete(manifest, state.weights, base_path)
    return SavedModel(replace(state, weights=weights), formats.decode_gradient(manifest, files))
