"""Finds the layers of a model that get LoRA matrices."""

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinkercloud_worker.lora.adapters import Group, Target
from tinkercloud_worker.lora.experts import find_experts

_ROUTERS = frozenset({"gate", "router", "router_gate", "shared_expert_gate"})
"""Names of routers and of modules that contain one."""
_NOT_ADAPTED = frozenset({"q_b_proj", "kv_b_proj", "dt_proj"})
"""Leaf names of other excluded layers; Mamba reads the weight of `dt_proj` without calling it."""
_MAMBA_OUTPUT = "out_proj"
"""Leaf name of the last matrix of a Mamba layer."""
_MAMBA_TYPES = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Values of `model_type` for which PEFT refuses adapters of `out_proj`, since fused kernels read
its weight without calling it."""


def find_targets(model: PreTrainedModel, backbone_name: str, lm_head_name: str) -> list[Target]:
    """Return the LoRA targets of a model, in the order of its modules.

    Targets are the same as in Tinker: all linear layers except routers; in latent attention (MLA)
    the down-projections but not the up-projections; in Mamba models whose `out_proj` PEFT refuses,
    all but that. Layers that do not compute what their class
    name says, and weights that are read without calling their layer, are also excluded.

    Args:
        model: any Hugging Face causal LM, with or without weights.
        backbone_name: the name of the module that holds its layers.
        lm_head_name: the name of its LM head.
    """
    targets: list[Target] = []
    experts = {each.name: each.targets for each in find_experts(model)}
    kind = model.config.model_type
    for name, module in model.named_modules():
        shape = _linear_shape(module)
        if name in experts:
            targets.extend(experts[name])
        elif name == lm_head_name and shape:
            targets.append(Target(name, *shape, group="unembed"))
        elif shape and name.startswith(f"{backbone_name}.") and _is_in_a_layer(name, kind):
            targets.append(Target(name, *shape, group=_group(name)))
    return targets


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear) and _is_plain(type(module)):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None


def _is_plain(kind: type[nn.Linear]) -> bool:
    """Whether a class computes an ordinary linear layer; Falcon's class only spells it out."""
    return kind.forward is nn.Linear.forward or kind.__name__ == "FalconLinear"


def _is_in_a_layer(name: str, model_type: str) -> bool:
    """Whether a module is an adaptable part of one of the numbered layers."""
    parts = name.split(".")
    return (
        any(part.isdigit() for part in parts)
        and _ROUTERS.isdisjoint(parts)
        and parts[-1] not in _NOT_ADAPTED
        and not (parts[-1] == _MAMBA_OUTPUT and model_type in _MAMBA_TYPES)
    )


def _group(name: str) -> Group:
    return "attention" if "attn" in name or "attention" in name else "mlp"
