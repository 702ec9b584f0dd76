"""Alternative names by which clients request a served model and its tokenizer.

NAME:peft:<length>        a long-context variant in Tinker's naming; refers to NAME
ORG/MODEL of ORG/MODEL/VARIANT, NAME of NAME:...
the tokenizer, under the model name as the SDK shortens it
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
    """Return a model's name without the context length suffix that Tinker's names may have.

    The hosted service bills variants by this length. Here, a model has a single context length, as
    reported by `get_server_capabilities`, and longer sequences are rejected under any name.
    """
    return _CONTEXT_LENGTH.sub("", name)


def is_of(name: str, base_model: str) -> bool:
    """Whether a name sent by a client refers to a base model."""
    return base_model in {name, without_context_length(name)}


def model_of(name: str, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the served model that a name refers to, or None."""
    by_name = {model.name: model for model in models}
    return by_name.get(name) or by_name.get(without_context_length(name))


def model_with_tokenizer(repo: str, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the served model whose tokenizer a hub repository name refers to, or None."""
    for model in models:
        if repo in {model.name, model.tokenizer}:
            return model
    if repo == LLAMA_3_TOKENIZER:
        llamas = [model for model in models if model.name.startswith(_LLAMA_3)]
        # All of them share a vocabulary; only instruct models have the chat template.
        return max(llamas, key=lambda model: "Instruct" in model.name, default=None)
    return next((model for model in models if repo == _shortened(model.name)), None)


def _shortened(name: str) -> str:
    """Return the repository from which the SDK loads the tokenizer of a model."""
    name = name.partition(":")[0]
    return name.rpartition("/")[0] if name.count("/") == 2 else name
