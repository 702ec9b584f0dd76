"""Alternative names by which clients request a served model and its tokenizer.

an alias                  a name that the operator configured (the setting `aliases`)
NAME:peft:<length>        a long-context variant in Tinker's naming; refers to NAME
ORG/MODEL of ORG/MODEL/VARIANT, NAME of NAME:...
the tokenizer, under the model name as the SDK shortens it
thinkingmachineslabinc/meta-llama-3-instruct-tokenizer
the tokenizer, as the SDK and the cookbook rename meta-llama/Llama-3...
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

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


def with_aliases(models: Sequence[ServedModel], aliases: Mapping[str, str]) -> list[ServedModel]:
    """Return served models with their aliases. A model's own name takes precedence over an alias.

    Args:
        models: the served models.
        aliases: names of served models by alias.
    """
    names = {model.name for model in models}
    return [
        dataclasses.replace(
            model,
            aliases=tuple(
                alias
                for alias, target in aliases.items()
                if target == model.name and alias not in names
            ),
        )
        for model in models
    ]


def is_of(name: str, base_model: str, models: Sequence[ServedModel]) -> bool:
    """Whether a name sent by a client refers to a base model, which need not be served now."""
    served = model_of(name, models)
    refers = {name, without_context_length(name)}
    return base_model in refers or (served is not None and served.name == base_model)


def model_of(name: str, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the served model that a name refers to, or None."""
    by_name = {each: model for model in models for each in model.names}
    return by_name.get(name) or by_name.get(without_context_length(name))


def model_with_tokenizer(repo: str, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the served model whose tokenizer a hub repository name refers to, or None."""
    for model in models:
        if repo in {*model.names, model.tokenizer}:
            return model
    if repo == LLAMA_3_TOKENIZER:
        llamas = [
            (name, model) for model in models for name in model.names if name.startswith(_LLAMA_3)
        ]
        # All of them share a vocabulary; only instruct models have the chat template.
        _, found = max(llamas, key=lambda named: "Instruct" in named[0], default=(None, None))
        return found
    return next((each for each in models if repo in map(_shortened, each.names)), None)


def _shortened(name: str) -> str:
    """Return the repository from which the SDK loads the tokenizer of a model."""
    name = name.partition(":")[0]
    return name.rpartition("/")[0] if name.count("/") == 2 else name
