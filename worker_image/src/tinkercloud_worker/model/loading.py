"""Loads full models from Hugging Face folders on the CPU."""

from itertools import chain
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.image_files import IMAGE_MODEL_TYPES
from tinkercloud_worker.model.architecture import (
    backbone_and_lm_head,
    check_tied,
    is_tied,
    keep_text,
    model_class,
    read_config,
)
from tinkercloud_worker.model.quantized import QuantizedFolder, block_size, check_format
from tinkercloud_worker.model.weights_check import (
    check_finite,
    check_weights,
    expected_of,
    load_checked,
)


def load_pretrained(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a Hugging Face model on the CPU, with its vision tower if images of its family are read.

    Args:
        path: the folder.
        dtype: the dtype of the loaded weights, regardless of the dtype in the files.

    Raises:
        UnsupportedModelError: transformers has no language model of this configuration, the weights
            do not match it, or they are in an unsupported quantized format.
    """
    check_format(path, read_config(path))
    check_weights(path)
    model = _load(path, dtype)
    if model.config.model_type not in IMAGE_MODEL_TYPES:
        keep_text(model)
    check_finite(path, chain(model.named_parameters(), model.named_buffers()))
    if is_tied(model.config):
        _, lm_head = backbone_and_lm_head(model)
        embedding = model.get_input_embeddings()
        check_tied(embedding.get_parameter("weight"), lm_head.get_parameter("weight"))
    return model


def _load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    config = read_config(path)
    block = block_size(config)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path, "local_files_only": True}
    if block is not None:
        # transformers reads these too, but only matrices whose sizes are multiples of the block
        # size.
        del config.quantization_config
        folder = QuantizedFolder(path, block, dtype)
        source = {
            "pretrained_model_name_or_path": None,
            "state_dict": folder.read(folder.names),
        }
    kind, own_config = model_class(config)
    return load_checked(path, kind, expected_of(config), **source, config=own_config, dtype=dtype)
