"""A BaseModel as clients see it."""

from pathlib import Path

from tinkercloud_api.providers.base import ServedModel
from tinkercloud_api.providers.model_arguments import reads_images
from tinkercloud_crds.base_model import BaseModelSpec


def served_model(spec: BaseModelSpec, models_dir: Path | None) -> ServedModel:
    """Return what is known of a BaseModel.

    Args:
        spec: of the BaseModel.
        models_dir: where the volumes of models are mounted, in folders named after their claims;
            None if they aren't.
    """
    folder = None
    if models_dir is not None and spec.source.volume is not None:
        volume = spec.source.volume
        mounted = models_dir / volume.claim_name / volume.path
        folder = mounted if mounted.is_dir() else None
    return ServedModel(
        name=spec.model_name,
        max_context_length=spec.max_context_length,
        local_path=str(folder) if folder is not None else None,
        tokenizer=spec.tokenizer or spec.model_name,
        reads_images=folder is not None and _serves_images(spec) and reads_images(folder),
        max_lora_rank=spec.limits.max_lora_rank,
    )


def _serves_images(spec: BaseModelSpec) -> bool:
    """Return whether trainer and sampler are known to read images."""
    return spec.trainer.backend != "megatron" and spec.sampler.backend == "torch"
