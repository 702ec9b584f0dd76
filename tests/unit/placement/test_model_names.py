"""Which served model, and whose tokenizer, a name of a client refers to."""

import pytest

from tinkercloud_api.providers.base import ServedModel, unknown_base_model
from tinkercloud_api.providers.model_names import (
    LLAMA_3_TOKENIZER,
    is_of,
    model_of,
    model_with_tokenizer,
    with_aliases,
)

QWEN, LLAMA = "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Llama-3.1-8B-Instruct"
MODELS = with_aliases(
    [ServedModel("small", 512), ServedModel("large", 512)],
    {QWEN: "small", LLAMA: "large", "a/b/variant": "large", "lost": "unknown", "large": "small"},
)


@pytest.mark.parametrize("suffix", ["", ":peft:262144"])
@pytest.mark.parametrize(
    ("name", "model"), [("small", "small"), (QWEN, "small"), (LLAMA, "large"), ("large", "large")]
)
def test_an_alias_refers_to_its_model_with_and_without_a_context_length(
    name: str, model: str, suffix: str
) -> None:
    found = model_of(name + suffix, MODELS)

    assert found is not None
    assert found.name == model
    assert is_of(name + suffix, model, MODELS)
    assert not is_of(name + suffix, "another", MODELS)


@pytest.mark.parametrize("name", ["lost", "unknown", "Qwen/Qwen3-4B"])
def test_other_names_refer_to_nothing(name: str) -> None:
    assert model_of(name, MODELS) is None
    assert model_with_tokenizer(name, MODELS) is None


def test_a_checkpoint_of_a_model_that_is_not_served_is_known_by_its_own_name_only() -> None:
    assert is_of("gone:peft:8", "gone", MODELS)
    assert not is_of(QWEN, "gone", MODELS)


@pytest.mark.parametrize(
    ("repository", "model"),
    [(QWEN, "small"), ("a/b", "large"), (LLAMA_3_TOKENIZER, "large"), ("small", "small")],
)
def test_the_mirror_serves_the_tokenizer_under_an_alias_as_the_sdk_shortens_it(
    repository: str, model: str
) -> None:
    found = model_with_tokenizer(repository, MODELS)

    assert found is not None
    assert found.name == model


def test_the_error_for_an_unknown_name_lists_aliases() -> None:
    assert f"'small', '{QWEN}', 'large'" in unknown_base_model("other", MODELS)
