"""Decides whether a head reads images, and builds what reads them."""

from collections.abc import Callable

from tinkercloud_protocol.heads.launch import HeadConfig
from tinkercloud_protocol.requests.image_files import IMAGE_MODEL_TYPES
from tinkercloud_worker.engine.prompt_images import PromptImages
from tinkercloud_worker.engine.trainer import Trainer
from tinkercloud_worker.model.architecture import read_config
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.vision.processor import load_processor


def build_images(
    config: HeadConfig, base: Callable[[], TorchBaseModel], trainer: Trainer
) -> PromptImages:
    """Return how the served model reads images; every engine of the head must compute them.

    Args:
        config: the head's configuration.
        base: returns the head's copy of the base model, which it has loaded if it computes itself.
        trainer: the head's trainer.
    """
    processor = load_processor(config.model.path)
    if processor is None:
        return PromptImages(refusal=_why_unread(config.model.path))
    trains, samples = config.trainer.backend != "none", config.sampler.backend == "torch"
    if (trains and not trainer.reads_images) or (samples and not base().images.are_read):
        return PromptImages(
            refusal="the weight files of this model lack its vision tower, so it reads text only;"
            " images need the complete published files"
        )
    return PromptImages(processor, config.limits)


def _why_unread(path: str) -> str:
    model_type = read_config(path).model_type
    families = ", ".join(sorted(IMAGE_MODEL_TYPES))
    if model_type in IMAGE_MODEL_TYPES:
        return (
            "this model reads text only, because its folder has no preprocessor_config.json; images"
            " need the complete published files"
        )
    return (
        f"this model reads text only: images of model_type {model_type!r} are not supported; use a"
        f" model of one of these: {families}"
    )
