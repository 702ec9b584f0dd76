"""LoRA targets of different families, and unsupported models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import HunYuanMoEV1Config, JambaConfig, JetMoeConfig
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_worker.model.architecture import (
    UnsupportedModelError,
    backbone_and_lm_head,
    blank_model,
    name_of,
    targets_of,
)
from tinkercloud_worker.model.base_model import TorchBaseModel

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def leaves_of(model: PreTrainedModel) -> set[str]:
    """Return the names within their layers of what is adapted."""
    backbone, lm_head = backbone_and_lm_head(model)
    targets = targets_of(model, name_of(model, backbone), name_of(model, lm_head))
    return {target.name.partition("layers.")[2].partition(".")[2] for target in targets}


class Halved(nn.Linear):
    """A linear layer that is computed in a way of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input) / 2


@pytest.mark.parametrize(
    ("config", "routers"),
    [
        (HunYuanMoEV1Config(**SMALL, head_dim=8, num_experts=4, moe_topk=2), {"mlp.gate.wg"}),
        (
            JetMoeConfig(**SMALL, kv_channels=8, num_local_experts=4),
            {"mlp.router.layer", "self_attention.experts.router.layer"},
        ),
    ],
    ids=["hunyuan", "jetmoe"],
)
def test_routers_are_frozen_wherever_a_family_has_them(config: object, routers: set[str]) -> None:
    model = blank_model(config)
    linear = {
        name.partition("layers.")[2].partition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }

    assert routers <= linear
    assert not routers & leaves_of(model)


def test_a_weight_that_is_read_without_calling_its_layer_has_no_adapter() -> None:
    leaves = leaves_of(
        blank_model(JambaConfig(**SMALL, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1))
    )

    assert "mamba.in_proj" in leaves
    assert "mamba.dt_proj" not in leaves


def test_a_linear_layer_with_a_computation_of_its_own_keeps_it_and_has_no_adapter() -> None:
    model = tiny_llama()
    layer = model.model.layers[0].self_attn
    own = Halved(layer.o_proj.in_features, layer.o_proj.out_features, bias=False)
    layer.o_proj = own
    ids = torch.tensor([[5, 6, 7]])
    expected = model(input_ids=ids).logits.detach()

    base = TorchBaseModel(model)

    adapted = {target.name for target in base.targets}
    assert "model.layers.0.self_attn.o_proj" not in adapted
    assert "model.layers.1.self_attn.o_proj" in adapted
    torch.testing.assert_close(base.logits(base.hidden(ids, ())[0], ()), expected[0])


def test_an_lm_head_of_an_unsupported_shape_is_rejected_with_a_clear_message() -> None:
    model = tiny_llama()
    model.lm_head = nn.Linear(2 * model.config.hidden_size, model.config.vocab_size, bias=False)

    with pytest.raises(UnsupportedModelError, match="can't compute its layers or its LM head"):
        TorchBaseModel(model)
