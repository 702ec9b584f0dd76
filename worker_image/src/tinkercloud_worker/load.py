"""Models of Hugging Face folders, loaded whole on the CPU."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.architecture import check_tied, is_tied, trunk_and_head
from tinkercloud_worker.quantized import QuantizedFolder, block_size


def load_pretrained(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the Hugging Face model of a folder, on the CPU.

    Args:
        path: of the folder.
        dtype: that its weights are kept in, whatever they are in the folder.

    Raises:
        UnsupportedModelError: its weights are float8 in a form that is not read, or are not those
            that its configuration describes.
    """
    model = _load(path, dtype)
    if is_tied(model.config):
        _, head = trunk_and_head(model)
        embedding = model.get_input_embeddings()
        check_tied(embedding.get_parameter("weight"), head.get_parameter("weight"))
    return model


def _load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    block = block_size(config)
    model: PreTrainedModel
    if block is None:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        return model
    # transformers reads them too, but only matrices that whole blocks fill.
    del config.quantization_config
    folder = QuantizedFolder(path, block, dtype)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    weights = folder.read(folder.names)
    model = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    return model
