"""The names by which clients ask for a served model and its tokenizer, besides its own.

NAME:peft:<length>        Tinker's names of long-context variants: NAME is meant
ORG/MODEL of ORG/MODEL/VARIANT, NAME of NAME:...
the tokenizer, as the SDK shortens the name of a model
thinkingmachineslabinc/meta-llama-3-instruct-tokenizer
the tokenizer, as the SDK and the cookbook rename meta-llama/Llama-3...
"""

import re
from collections.abc import Sequence

from tinkercloud_api.providers.base import ServedModel

_CONTEXT_LENGTH = re.compile(r":peft:[1-9][0-9]{0,8}$")
_LLAMA_3 = "meta-llama/Llama-3"
LLAMA_3_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


def without_context_length(name: str) -> str:
    """Return a model's name without the context length that Tinker's names may end with.

    The length is what the hosted service bills a variant by. Here a model has one context length,
    that of `get_server_capabilities`, and longer sequences are refused whatever the name.
    """
    return _CONTEXT_LENGTH.sub("", name)


def is_of(name: str, base_model: str) -> bool:
    """Whether a name that a client sends means a base model."""
    return base_model in {name, without_context_length(name)}


def model_of(name: str, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the served model that a name means; None if there is none."""
    by_name = {model.name: model for model in models}
    return by_name.get(name) or by_name.get(without_context_length(name))


def model_with_tokenizer(repo: str, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the served model whose tokenizer a client asks the hub for; None if there is none."""
    for model in models:
        if repo in {model.name, model.tokenizer}:
            return model
    if repo == LLAMA_3_TOKENIZER:
        llamas = [model for model in models if model.name.startswith(_LLAMA_3)]
        # All have one vocabulary; those of instruct models have the chat template.
        return max(llamas, key=lambda model: "Instruct" in model.name, default=None)
    return next((model for model in models if repo == _shortened(model.name)), None)


def _shortened(name: str) -> str:
    """Return the repository that the SDK asks for the tokenizer of a model of this name."""
    name = name.partition(":")[0]
    return name.rpartition("/")[0] if name.count("/") == 2 else name
