"""Makes megatron-core compute mixtures of experts as in Hugging Face.

Experts keep megatron-core's own weights, and tokens are sent to the ranks that hold them. No token
is dropped and no auxiliary loss is added, so the result of a token does not depend on the others in
its batch. The weights of routers and experts are only trained in full fine-tuning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.tensor_slices import TensorSlice, full_slice
from tinkercloud_worker.lora.experts import find_experts
from tinkercloud_worker.losses import LossInputs
from tinkercloud_worker.megatron_trainer.layers import deepseek
from tinkercloud_worker.megatron_trainer.layers.grouped_experts import located
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.training.packing import Pack

# megatron-core looks up Transformer Engine's product by this name even if it is not installed.
vars(moe_utils).setdefault("te_general_gemm", None)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer, from a configuration."""

    experts: int
    chosen: int
    """Experts per token."""
    width: int
    """Intermediate size of an expert."""
    normed: bool
    """Whether the weights of the selected experts sum to one, instead of those of all experts."""


def mixture_of(config: Any) -> Mixture | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the experts of a Hugging Face configuration; None if it has none.

    Raises:
        UnsupportedModelError: only some layers have experts.
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
            "the megatron trainer needs experts in every layer, but this model has"
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
    """Check that the experts of a model are supported with this parallelism.

    Raises:
        UnsupportedModelError: they are not.
    """
    if mixture is None:
        if parallelism.expert > 1:
            raise UnsupportedModelError(
                f"trainer.expert_parallel is {parallelism.expert}, but this model has no experts;"
                " set it to 1"
            )
        return
    if mixture.chosen == 1 and mixture.normed:
        raise UnsupportedModelError(
            "the megatron trainer does not support mixtures that route each token to one expert"
            " with weight 1; use backend torch"
        )
    if mixture.experts % parallelism.expert:
        raise UnsupportedModelError(
            f"the number of experts, {mixture.experts}, is not divisible by trainer.expert_parallel"
            f" {parallelism.expert}"
        )
    if mixture.width % parallelism.tensor:
        raise UnsupportedModelError(
            f"an expert's intermediate size, {mixture.width}, is not divisible by"
            f" trainer.tensor_parallel {parallelism.tensor}"
        )


def settings(mixture: Mixture | None) -> Mapping[str, object]:
    """Return the TransformerConfig settings for a model's experts."""
    if mixture is None:
        return {}
    return {
        "moe_grouped_gemm": False,
        # The only dispatcher that supports different numbers of tokens on ranks.
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_pre_softmax": not mixture.normed,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def name_experts(bridge: Any) -> None:  # noqa: ANN401 - mbridge has no types
    """Make a bridge find the weights of experts that are separate modules.

    By default it finds those of grouped experts, which are numbered parameters of one module.
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
    """Return a function that maps a weight's name in files to its slice of a Hugging Face weight.

    The model stacks the weights of experts; files do not.

    Args:
        whole: the model, whose weights are not read.
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
        # Mixtral uses different names in files and modules.
        name = weight.replace(".block_sparse_moe.", ".mlp.")
        return full_slice(name, shapes[name])

    return find


def with_dummy_packs(packs: Sequence[Pack], device: torch.device) -> Sequence[Pack]:
    """Return packs followed by dummies: ranks with fewer packs run dummy passes.

    Ranks compute tokens of each other's passes, so all must run the same number of passes.
    """
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return packs
    most = torch.tensor(len(packs), device=device)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return [*packs, *[dummy_pack(device)] * (int(most) - len(packs))]


def dummy_pack(device: torch.device) -> Pack:
    """Return a pack with one position that belongs to no example."""
    return replace(
        empty_pack(device),
        sequences=PackedSequences(torch.zeros(1, dtype=torch.int64, device=device), (1,)),
    )


def empty_pack(device: torch.device) -> Pack:
    """Return a pack without any position."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return Pack(
        sequences=PackedSequences(none, ()),
        targets_RK=none.unsqueeze(1),
        inputs=LossInputs({}, datum_of_row=none, num_data=0),
        examples=(),
    )
