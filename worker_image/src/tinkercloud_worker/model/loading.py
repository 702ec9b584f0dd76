"""Models of Hugging Face folders, loaded whole on the CPU."""

from itertools import chain
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.model.architecture import (
    check_tied,
    is_tied,
    model_class,
    read_config,
    trunk_and_head,
)
from tinkercloud_worker.model.quantized import QuantizedFolder, block_size
from tinkercloud_worker.model.weights_check import (
    check_finite,
    check_weights,
    expected_of,
    load_checked,
)


def load_pretrained(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the Hugging Face model of a folder, on the CPU; of a vision-language model, its text.

    Args:
        path: of the folder.
        dtype: that its weights are kept in, whatever they are in the folder.

    Raises:
        UnsupportedModelError: transformers has no language model of this configuration, the weights
            are not those that it describes, or are float8 in a form that is not read.
    """
    check_weights(path)
    model = _load(path, dtype)
    check_finite(path, chain(model.named_parameters(), model.named_buffers()))
    if is_tied(model.config):
        _, head = trunk_and_head(model)
        embedding = model.get_input_embeddings()
        check_tied(embedding.get_parameter("weight"), head.get_parameter("weight"))
    return model


def _load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    config = read_config(path)
    block = block_size(config)
    source: dict[str, Any] = {"pretrained_model_name_or_path": path, "local_files_only": True}
    if block is not None:
        # transformers reads them too, but only matrices that whole blocks fill.
        del config.quantization_config
        folder = QuantizedFolder(path, block, dtype)
        source = {
            "pretrained_model_name_or_path": None,
            "state_dict": folder.read(folder.names),
        }
    kind, own_config = model_class(config)
    return load_checked(path, kind, expected_of(config), **source, config=own_config, dtype=dtype)
