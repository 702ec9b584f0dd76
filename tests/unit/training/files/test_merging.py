"""An adapter is merged into the model that it was trained on, and into no other."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.small_models.chat import a_chat_model
from tinkercloud_testing.small_models.models import tiny_gpt2, tiny_llama
from tinkercloud_testing.training.peft_adapters import logprobs, logprobs_of, write_adapter
from tinkercloud_worker.merge import CannotMergeError, _warn, merge

TOKENS = [5, 6, 7, 8, 9]
TARGETS = ["q_proj", "down_proj"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return the folder of a model of two layers, with a tokenizer."""
    return written(tiny_llama(), tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Return the folder of an adapter of that model."""
    return write_adapter(tiny_llama(), tmp_path / "adapter", target_modules=TARGETS)


def written(model: PreTrainedModel, folder: Path) -> Path:
    a_chat_model(folder)
    model.save_pretrained(folder)
    return folder


def test_the_merged_model_computes_what_peft_does(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / "merged").mkdir()
    steps: list[str] = []

    merge(base, adapter, tmp_path / "merged", steps.append)

    assert [step.split()[0] for step in steps] == ["loading", "merging", "writing"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert logprobs_of(merged, TOKENS) == pytest.approx(
        logprobs(tiny_llama(), adapter, TOKENS), abs=1e-4
    )
    assert {each.name for each in tmp_path.iterdir()} == {"base", "adapter", "merged"}
    (tmp_path / "new").touch()
    modes = {each.stat().st_mode for each in (tmp_path / "merged").iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: tiny_llama(layers=1), "the model has no place for .*layers.1.*and 3 others"),
        (lambda: tiny_llama(layers=3), "the adapter lacks .*layers.2.*and 3 others"),
        (lambda: tiny_llama(hidden_size=64), "size mismatch"),
        (tiny_gpt2, "Target modules .* not found"),
    ],
    ids=["fewer layers", "more layers", "wider", "another family"],
)
def test_the_base_model_of_another_adapter_is_refused_and_leaves_no_folder(
    adapter: Path, tmp_path: Path, other: object, reason: str
) -> None:
    assert callable(other)
    wrong = written(other(), tmp_path / "wrong")

    with pytest.raises(CannotMergeError, match=rf"does not fit {wrong}.*{reason}.*; pass the base"):
        merge(wrong, adapter, tmp_path / "merged")

    assert {each.name for each in tmp_path.iterdir()} == {"wrong", "adapter"}


def test_a_merge_that_cannot_write_everything_leaves_no_folder(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)

    with pytest.raises(OSError, match="No space left"):
        merge(base, adapter, tmp_path / "new" / "merged")

    assert [*(tmp_path / "new").iterdir()] == []


def test_the_program_prints_warnings_for_users_only(capsys: pytest.CaptureFixture[str]) -> None:
    _warn("odd", UserWarning, "peft.py", 1)
    _warn("old", FutureWarning, "peft.py", 1)

    assert capsys.readouterr().err == "UserWarning: odd\n"
