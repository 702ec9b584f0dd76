"""An untied copy of a model with tied embeddings computes the same results."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.small_models.models import save, tiny_gemma2, tiny_gpt2, tiny_llama
from tinkercloud_worker.untie import CannotUntieError, main, untie

IDS = torch.tensor([[5, 6, 7, 8]])
TIED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(tiny_llama, tied=True),
    "gemma": tiny_gemma2,
    "gpt2": tiny_gpt2,
}


def logits(model: torch.nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=IDS).logits
    return result


def loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.eval()
    return model


@pytest.mark.parametrize("size", ["5GB", "10KB"], ids=["one file", "several files"])
@pytest.mark.parametrize("name", TIED)
def test_it_has_the_logits_of_the_tied_model_and_its_own_lm_head(
    name: str, size: str, tmp_path: Path
) -> None:
    tied = TIED[name]()
    tied.save_pretrained(tmp_path / "tied", max_shard_size=size)

    untie(tmp_path / "tied", tmp_path / "untied")

    untied = loaded(tmp_path / "untied")
    assert torch.equal(logits(untied), logits(loaded(tmp_path / "tied")))
    weights = [
        layer.get_parameter("weight")
        for layer in (untied.get_input_embeddings(), untied.get_output_embeddings())
    ]
    assert weights[0].data_ptr() != weights[1].data_ptr()
    assert torch.equal(*weights)
    assert untied.config.tie_word_embeddings is False
    modes = {file.stat().st_mode for file in (tmp_path / "untied").iterdir()}
    assert modes == {(tmp_path / "tied" / "config.json").stat().st_mode}


def test_a_text_model_within_another_gets_an_lm_head_named_as_its_other_weights(
    tmp_path: Path,
) -> None:
    tied = save(tiny_llama(tied=True), tmp_path / "tied")
    weights = load_file(tied / "model.safetensors")
    wrapped = {f"language_model.{name}": weight for name, weight in weights.items()}
    save_file(wrapped, tied / "model.safetensors", metadata={"format": "pt"})

    untie(tied, tmp_path / "untied")

    index = json.loads((tmp_path / "untied" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {*wrapped, "language_model.lm_head.weight"}


def test_a_model_that_cannot_be_untied_is_rejected_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = save(tiny_llama(tied=True), tmp_path / "tied")
    untied = save(tiny_llama(), tmp_path / "untied")

    with pytest.raises(CannotUntieError, match="exists"):
        untie(tied, untied)
    with pytest.raises(CannotUntieError, match="not tied; merge adapters into it"):
        untie(untied, tmp_path / "copy")
    (tied / "model.safetensors").unlink()
    monkeypatch.setattr("sys.argv", ["untie", str(tied), str(tmp_path / "copy")])
    with pytest.raises(SystemExit, match="found none"):
        main()
    assert not (tmp_path / "copy").exists()


def test_the_command_prints_how_much_it_copies_and_where_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tied = save(tiny_llama(tied=True), tmp_path / "tied")

    monkeypatch.setattr("sys.argv", ["untie", str(tied), str(tmp_path / "copy")])
    main()
    monkeypatch.setattr("sys.argv", ["untie", str(tied)])
    with pytest.raises(SystemExit, match=r"usage: .* MODEL FOLDER"):
        main()

    assert capsys.readouterr().out == f"copying 0.0 GiB of weights ...\nwrote {tmp_path / 'copy'}\n"
