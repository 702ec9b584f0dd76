"""Completes imported adapters, which may lack some of a model's weights."""

from dataclasses import replace

from tinkercloud_protocol.checkpoints import CheckpointManifest
from tinkercloud_worker.engine.trainer import WeightsSnapshot
from tinkercloud_worker.lora import imported
from tinkercloud_worker.model.architecture import BUILDING, read_architecture


def complete(manifest: CheckpointManifest, weights: WeightsSnapshot, path: str) -> WeightsSnapshot:
    """Return the weights of a checkpoint; an imported one gets the weights that it lacks.

    Args:
        manifest: the checkpoint's manifest.
        weights: the weights that its files contain.
        path: folder of the base model.

    Raises:
        InvalidRequest: an imported adapter does not fit the base model.
    """
    if manifest.imported is None or weights.lora is None:
        return weights
    with BUILDING:
        targets = read_architecture(path).targets
    return replace(weights, tensors=imported.complete(weights.tensors, targets, weights.lora))
