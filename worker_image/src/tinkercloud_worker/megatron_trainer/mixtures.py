"""Mixtures of experts: what makes megatron-core compute them as Hugging Face does.

Experts have megatron-core's own weights, and tokens travel to the ranks that hold them. No token is
dropped and no loss is added: what a token gets does not depend on the others in its batch. Routers
and experts are trained with whole models only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device.packing import PackedSequences
from tinkercloud_worker.lora.experts import find_experts
from tinkercloud_worker.losses import LossInputs
from tinkercloud_worker.megatron_trainer import deepseek
from tinkercloud_worker.megatron_trainer.grouped_experts import located
from tinkercloud_worker.megatron_trainer.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.tensor_slices import TensorSlice, full_slice
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.training.collate import Pack

# megatron-core asks for Transformer Engine's product by this name, also where it has not got it.
vars(moe_utils).setdefault("te_general_gemm", None)


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a configuration says about the experts of a layer."""

    experts: int
    chosen: int
    """Experts that each token is sent to."""
    width: int
    """Intermediate features of an expert."""
    normed: bool
    """Whether the weights of the chosen experts sum to one; else they are shares among all."""


def mixture_of(config: Any) -> Mixture | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return what a Hugging Face configuration says about experts; None if it has none.

    Raises:
        UnsupportedModelError: layers without experts are among those that have them.
    """
    if config.model_type == "mixtral":
        chosen = config.num_experts_per_tok
        return Mixture(config.num_local_experts, chosen, config.intermediate_size, normed=True)
    if config.model_type in deepseek.FAMILIES:
        return Mixture(
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            normed=bool(config.norm_topk_prob),
        )
    if config.model_type != "qwen3_moe":
        return None
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise UnsupportedModelError(
            "the megatron trainer wants experts in every layer, but this model has"
            f" mlp_only_layers {config.mlp_only_layers} and decoder_sparse_step"
            f" {config.decoder_sparse_step}; use backend torch"
        )
    return Mixture(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.norm_topk_prob,
    )


def check(mixture: Mixture | None, parallelism: Parallelism) -> None:
    """Check that the experts of a model can be computed and divided so.

    Raises:
        UnsupportedModelError: they can't.
    """
    if mixture is None:
        if parallelism.expert > 1:
            raise UnsupportedModelError(
                f"trainer.expert_parallel: {parallelism.expert}, but this model has no experts; set"
                " it to 1"
            )
        return
    if mixture.chosen == 1 and mixture.normed:
        raise UnsupportedModelError(
            "the megatron trainer does not compute mixtures that send each token to one expert with"
            " weight 1; use backend torch"
        )
    if mixture.experts % parallelism.expert:
        raise UnsupportedModelError(
            f"expert parallelism {parallelism.expert} does not divide the {mixture.experts} experts"
        )
    if mixture.width % parallelism.tensor:
        raise UnsupportedModelError(
            f"tensor parallelism {parallelism.tensor} does not divide an expert's intermediate size"
            f" {mixture.width}"
        )


def settings(mixture: Mixture | None) -> Mapping[str, object]:
    """Return what a TransformerConfig says about a model's experts."""
    if mixture is None:
        return {}
    return {
        "moe_grouped_gemm": False,
        # The one dispatcher for ranks that have different numbers of tokens.
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_pre_softmax": not mixture.normed,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def name_experts(bridge: Any) -> None:  # noqa: ANN401 - mbridge has no types
    """Make a bridge find the weights of experts that are modules of their own.

    It knows those of grouped experts, which are numbered parameters of one module.
    """
    to_global = bridge._weight_name_mapping_mcore_local_to_global

    def with_experts(model: nn.Module, **options: bool) -> dict[str, str]:
        here = (bridge.config.num_moe_experts or 0) // bridge.mpu.ep_size
        names = to_global(model, **options).items()
        return {local: _numbered(name, bridge.mpu.ep_rank * here) for local, name in names}

    bridge._weight_name_mapping_mcore_local_to_global = with_experts


def _numbered(name: str, first: int) -> str:
    before, found, after = name.partition(".local_experts.")
    if not found:
        return name
    number, _, weight = after.partition(".")
    return f"{before}.{weight}{first + int(number)}"


def made_of(whole: PreTrainedModel) -> Callable[[str], TensorSlice]:
    """Return a function from a weight's name in files to its slice of a Hugging Face model's.

    The model stacks the weights of experts, files do not.

    Args:
        whole: the model. Its weights are not read.
    """
    shapes = {name: tuple(weight.shape) for name, weight in whole.named_parameters()}
    stacked: dict[str, tuple[str, tuple[int, int]]] = {}
    for each in find_experts(whole):
        width, hidden = each.gate.out_features, each.down.out_features
        stacked[each.gate.name] = (f"{each.name}.gate_up_proj", (0, width))
        stacked[each.up.name] = (f"{each.name}.gate_up_proj", (width, 2 * width))
        stacked[each.down.name] = (f"{each.name}.down_proj", (0, hidden))

    def find(weight: str) -> TensorSlice:
        if ".experts." in weight:
            target, number = located(weight)
            name, rows = stacked[target]
            return TensorSlice(name, ((number, number + 1), rows, (0, shapes[name][-1])))
        # Mixtral's files and modules have two names for the same.
        name = weight.replace(".block_sparse_moe.", ".mlp.")
        return full_slice(name, shapes[name])

    return find


def with_dummy_packs(packs: Sequence[Pack], device: torch.device) -> Sequence[Pack]:
    """Return packs and dummies: ranks with fewer packs run dummy passes.

    Ranks compute tokens of each other's passes, so all of them have to run as many.
    """
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return packs
    most = torch.tensor(len(packs), device=device)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return [*packs, *[_dummy_pack(device)] * (int(most) - len(packs))]


def _dummy_pack(device: torch.device) -> Pack:
    """Return a pack of one position that belongs to no example."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return Pack(
        sequences=PackedSequences(torch.zeros(1, dtype=torch.int64, device=device), (1,)),
        targets_RK=none.unsqueeze(1),
        inputs=LossInputs({}, datum_of_row=none, num_data=0),
        examples=(),
    )
