"""Weight files that do not match the configuration are rejected: no weight is invented or
dropped."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.small_models.families import (
    ONE_BY_ONE,
    SCALED,
    SLOTTED,
    VISION_LANGUAGE,
    llama4,
)
from tinkercloud_testing.small_models.models import (
    save,
    tiny_deepseek_v3,
    tiny_gpt2,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.small_models.quantizing import quantize
from tinkercloud_testing.small_models.wrong_folders import (
    FILE,
    SHARDS,
    UP,
    Fault,
    a_gguf_file,
    a_hole,
    a_web_page,
    added,
    configured,
    cut_short,
    expert,
    in_float8,
    in_shards,
    indexed,
    layers,
    lost,
    of_another_type,
    pickled,
    prefixed,
    renumbered,
    shape,
    stale_single,
    twice,
    value,
    weights,
    with_an_adapter,
    without_first_part,
    without_weights,
)
from tinkercloud_worker.model.architecture import UnsupportedModelError, read_architecture
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.loading import load_pretrained
from tinkercloud_worker.model.weights_check import check_values, check_weights

Make = Callable[[], PreTrainedModel]
MAKERS: dict[str, Make] = {
    "llama": tiny_llama,
    "tied qwen3": tiny_qwen3,
    "gpt2": tiny_gpt2,
    "qwen3 mixture": tiny_qwen3_moe,
    "mixtral": tiny_mixtral,
    "deepseek v3": tiny_deepseek_v3,
    "gemma 3": VISION_LANGUAGE["Gemma 3"],
    "qwen2.5 vl": VISION_LANGUAGE["Qwen2.5-VL"],
    "qwen3.5 vl": VISION_LANGUAGE["Qwen3.5"],
}


FAULTS: list[tuple[str, Fault, str]] = [
    ("llama", lost(UP), f"missing in the files: {UP}"),
    ("llama", lost("model.embed_tokens.weight"), r"missing.*model\.embed_tokens\.weight"),
    ("llama", lost("model.norm.weight"), r"missing.*model\.norm\.weight"),
    ("llama", lost("lm_head.weight"), r"lm_head\.weight; .*set tie_word_embeddings to true"),
    ("tied qwen3", configured(tie_word_embeddings=False), r"set tie_word_embeddings to true"),
    ("tied qwen3", lost("model.embed_tokens.weight"), r"missing.*model\.embed_tokens\.weight"),
    ("llama", prefixed("_orig_mod."), r"all names .* start with '_orig_mod\.'"),
    ("llama", prefixed("module."), r"all names .* start with 'module\.'"),
    ("llama", prefixed("base_model.model."), r"start with 'base_model\.model\.'"),
    ("tied qwen3", prefixed("_orig_mod."), r"start with '_orig_mod\.'"),
    ("gpt2", prefixed("_orig_mod."), r"start with '_orig_mod\.'"),
    ("qwen3 mixture", prefixed("_orig_mod."), r"_orig_mod\."),
    ("llama", configured(num_hidden_layers=3), r"weights of layers \[2\] are missing"),
    ("llama", configured(num_hidden_layers=1), r"is 1, but the files have layers up to 1"),
    ("deepseek v3", configured(num_hidden_layers=2), r"is 2, but the files have layers up to 2"),
    ("llama", configured(intermediate_size=48), r"up_proj\.weight \[64, 32\].*\[48, 32\]"),
    ("llama", configured(vocab_size=260), r"\[264, 32\] in the files, \[260, 32\]"),
    ("llama", configured(num_key_value_heads=4), r"k_proj\.weight \[16, 32\]"),
    ("llama", configured(attention_bias=True), r"missing.*q_proj\.bias|missing.*k_proj\.bias"),
    ("llama", configured(model_type="qwen3"), r"q_norm\.weight|k_norm\.weight"),
    ("tied qwen3", configured(model_type="llama"), r"not in the model: .*k_norm\.weight"),
    (
        "llama",
        added("model.layers.0.self_attn.q_proj.bias", 32),
        r"not in the model: .*q_proj\.bias",
    ),
    ("llama", added("v_head.summary.weight", 1, 32), r"not in the model: v_head\.summary"),
    ("llama", shape(UP, lambda w: w.T), r"up_proj\.weight \[32, 64\] in the files, \[64, 32\]"),
    ("llama", shape("model.norm.weight", lambda w: w[:16]), r"model\.norm\.weight \[16\]"),
    (
        "llama",
        indexed(lambda files: files.update({UP: "model-3.safetensors"})),
        "missing files: model-3",
    ),
    ("llama", indexed(lambda files: files.update(extra=SHARDS[0])), "in none of its files: extra"),
    ("llama", indexed(lambda files: files.update({UP: SHARDS[0]})), f"wrong file for: {UP}"),
    ("llama", indexed(lambda files: files.clear()), "lists no weights"),
    ("llama", twice, "is in two files"),
    ("llama", stale_single, "in addition to model.safetensors.index.json"),
    ("llama", cut_short, "truncated"),
    ("llama", without_weights, r"neither model\.safetensors nor"),
    ("llama", a_web_page, "not a safetensors file"),
    ("llama", with_an_adapter, "holds an adapter; merge it"),
    ("llama", of_another_type, "has no model_type 'acme'"),
    ("llama", pickled, f"missing in the files: {UP}"),
    ("llama", value(UP, float("nan")), f"NaN or infinite values in {UP}"),
    ("llama", value("model.norm.weight", float("inf")), r"infinite values in model\.norm\.weight"),
    ("llama", value("lm_head.weight", float("-inf")), r"infinite values in lm_head\.weight"),
    ("llama", added("extra", 4, dtype=torch.int8), "extra .*int8"),
    ("llama", shape(UP, lambda w: w.to(torch.float8_e4m3fn)), "no quantization_config"),
    ("llama", shape(UP, lambda w: w.to(torch.int64)), rf"{UP} \(torch\.int64\); .*in bfloat16"),
    ("llama", shape(UP, lambda w: w.to(torch.int32)), r"torch\.int32"),
    ("llama", shape(UP, lambda w: w.to(torch.int16)), r"torch\.int16"),
    ("llama", shape(UP, lambda w: w > 0), rf"{UP} \(torch\.bool\)"),
    ("llama", shape("model.norm.weight", lambda w: w.to(torch.uint8)), r"torch\.uint8"),
    ("llama", shape("lm_head.weight", lambda w: w.to(torch.float8_e5m2)), "float8_e5m2"),
    ("qwen3 mixture", shape(expert(1), lambda w: w.to(torch.int64)), r"torch\.int64"),
    ("llama", configured(pad_token_id=264), r"can't be built: .*pad_token_id must be below"),
    ("llama", a_hole, r"a file can't be read \(.*\)\. Download the model again"),
    ("llama", a_gguf_file, r"convert_gguf .*/model\.gguf FOLDER"),
    *(
        (
            "llama",
            configured(quantization_config={"quant_method": method, "bits": 4}),
            f"quant_method {method!r}, but .*only block float8.* use a bfloat16 copy",
        )
        for method in ("awq", "gptq", "compressed-tensors", "bitsandbytes", "hqq", "torchao")
    ),
    ("llama", in_float8(lambda t: t.pop(f"{UP}_scale_inv")), f"missing.*{UP}_scale_inv"),
    ("llama", in_float8(lambda t: t.pop(UP)), "not float8: .*up_proj"),
    ("llama", in_float8(lambda t: t.update({f"{UP}_scale_inv": torch.ones(1, 1)})), "each block"),
    ("llama", in_float8(lambda t: t[f"{UP}_scale_inv"].fill_(float("nan"))), f"NaN.*{UP}"),
    ("qwen3 mixture", lost(expert(2)), re.escape(expert(2))),
    ("qwen3 mixture", lost(expert(3)), r"experts\.down_proj \[3, 32, 24\]"),
    ("qwen3 mixture", weights(renumbered), r"missing in the files: .*experts\.3\."),
    ("qwen3 mixture", shape(expert(1), lambda w: w[:16]), "different shapes"),
    ("qwen3 mixture", configured(num_local_experts=8), r"\[4, .* in the files, \[8, "),
    ("qwen3 mixture", configured(num_local_experts=2), r"\[4, .* in the files, \[2, "),
    ("qwen3 mixture", lost("model.layers.0.mlp.gate.weight"), r"missing.*gate\.weight"),
    ("qwen3 mixture", value(expert(1), float("nan")), r"NaN.*experts\.down_proj"),
    ("mixtral", configured(num_local_experts=8), r"\[4, .* in the files, \[8, "),
    ("deepseek v3", lost("model.layers.1.mlp.gate.e_score_correction_bias"), "missing.*correction"),
    ("deepseek v3", configured(first_k_dense_replace=0), r"missing.*layers\.0\.mlp"),
    ("deepseek v3", configured(kv_lora_rank=8), r"kv_a_"),
    ("gemma 3", lost("language_model.model.layers.1.mlp.up_proj.weight"), r"missing.*up_proj"),
    ("gemma 3", layers(3), r"layers\.2\."),
    ("gemma 3", layers(1), "is 1, but the files have layers up to 1"),
    ("gemma 3", configured(num_hidden_layers=1), r"config\.json can't be read: .*layer_types"),
    ("qwen2.5 vl", lost("lm_head.weight"), r"missing.*lm_head"),
    ("qwen3.5 vl", prefixed("_orig_mod."), r"_orig_mod\."),
]


@pytest.mark.parametrize(
    ("model", "fault", "message"), FAULTS, ids=[f"{model}, {why}" for model, _, why in FAULTS]
)
def test_files_that_do_not_hold_the_model_are_rejected_by_name(
    tmp_path: Path, model: str, fault: Fault, message: str
) -> None:
    folder = save(MAKERS[model](), tmp_path)
    fault(folder)

    with pytest.raises(UnsupportedModelError, match=message) as refused:
        load_pretrained(str(folder), torch.float32)

    assert len(str(refused.value)) < 1500


def test_a_model_without_weight_files_is_not_loaded(tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path)
    without_weights(folder)

    assert read_architecture(str(folder)).targets
    with pytest.raises(UnsupportedModelError, match=r"neither model\.safetensors nor"):
        TorchBaseModel.load(str(folder), torch.float32)


FAMILIES = SLOTTED | ONE_BY_ONE | SCALED | VISION_LANGUAGE | {"Llama 4": llama4}


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_save_pretrained_load_whether_single_or_sharded(
    tmp_path: Path, family: str
) -> None:
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")

    assert not (tmp_path / "many" / FILE).exists()
    for folder in ("one", "many"):
        check_weights(str(tmp_path / folder))
        check_values(str(tmp_path / folder))


EXPLAINED: dict[str, tuple[str, Fault]] = {
    "whole numbers in a tower": (
        "gemma 3",
        added("model.vision_tower.embeddings.position_ids", 1, 4, dtype=torch.int64),
    ),
    "a mask of bits": (
        "gpt2",
        added("transformer.h.0.attn.bias", 1, 1, 128, 128, dtype=torch.bool),
    ),
    "old rotary buffers": ("llama", added("model.layers.0.self_attn.rotary_emb.inv_freq", 4)),
    "old causal masks": ("gpt2", added("transformer.h.0.attn.bias", 1, 1, 128, 128)),
    "an output layer that is the embedding again": (
        "tied qwen3",
        weights(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})),
    ),
    "names without their common first part": (
        "llama",
        without_first_part,
    ),
    "layers that predict further tokens": (
        "deepseek v3",
        added("model.layers.3.eh_proj.weight", 32, 64),
    ),
    "such layers under a name of their own": ("qwen3.5 vl", added("mtp.fc.weight", 32, 64)),
    "a vision tower of another size": ("gemma 3", added("model.vision_tower.extra.weight", 4)),
    "no vision tower at all": (
        "gemma 3",
        weights(lambda t: [t.pop(name) for name in list(t) if "vision_tower" in name]),
    ),
    "float8": ("llama", lambda folder: quantize(folder, (24, 32)) and None),
    "float8 experts": ("deepseek v3", lambda folder: quantize(folder, (24, 32)) and None),
    "shards": ("qwen3 mixture", in_shards),
}


@pytest.mark.parametrize("what", EXPLAINED)
def test_unused_and_derived_tensors_in_files_are_accepted(tmp_path: Path, what: str) -> None:
    model, change = EXPLAINED[what]
    folder = save(MAKERS[model](), tmp_path)
    change(folder)

    loaded = TorchBaseModel.load(str(folder), torch.float32)

    meant = save(MAKERS[model](), tmp_path / "meant")
    if "float8" in what:
        save_file(quantize(save(MAKERS[model](), tmp_path / "again"), (24, 32)), meant / FILE)
    expected = TorchBaseModel.load(str(meant), torch.float32).named_weights()
    ours = loaded.named_weights()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in ours.items())
