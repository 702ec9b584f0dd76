"""A tiny model that answers arithmetic problems in the right form, mostly with wrong numbers."""

import random
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tinkercloud_programs.rlve.problems import Problems
from tinkercloud_programs.rlve.prompts import prompt_tokens
from tinkercloud_protocol.programs.rlve import RlveConfig
from tinkercloud_testing.small_models.models import save, tiny_llama

_STEPS = 40
_ANSWERS = 4


def an_answering_model(config: RlveConfig, folder: Path) -> Path:
    """Return the folder of a model that answers the problems of a configuration.

    Args:
        config: names the environments and the prompts.
        folder: where to save the model.
    """
    model = tiny_llama()
    save(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, chance = Problems(config), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(_STEPS):
        loss = torch.zeros(())
        for _ in range(_ANSWERS):
            name = chance.choice(config.environment_list)
            prompt = prompt_tokens(tokenizer, problems.generate(name, 0, chance).text, config)
            answer = tokenizer.encode(f"<answer>{chance.randrange(10)}</answer>")
            tokens = torch.tensor([[*prompt, *answer, 256]])
            labels = tokens.clone()
            labels[:, : len(prompt)] = -100
            loss = loss + model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return save(model, folder)
