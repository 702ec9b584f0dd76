"""A small random model for RLVE, whose tokenizer knows the words of an environment's problems."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tinkercloud_programs.rlve.problems import Problems
from tinkercloud_protocol.programs.rlve import RlveConfig

END = "<|end|>"
VOCAB_SIZE = 512
HIDDEN_SIZE, LAYERS, HEADS = 128, 4, 4
POSITIONS = 256
NUM_TEXTS = 300


def tokenizer_of(config: RlveConfig) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single digits and of the words in problems of difficulty 0."""
    problems, chance = Problems(config), random.Random(0)  # noqa: S311 - not for secrets
    texts = [
        f"{problems.generate(name, 0, chance).text}\nWrite the final answer between <answer> and"
        " </answer>.\n<answer>1</answer>"
        for name in config.environment_list
        for _ in range(NUM_TEXTS)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = "{{ messages[0]['content'] }}\n"
    return fast


def save_small_model(config: RlveConfig, folder: Path) -> int:
    """Save a random Llama and its tokenizer, and return the number of parameters.

    Args:
        config: names the environments.
        folder: where to save it.
    """
    tokenizer = tokenizer_of(config)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=3 * HIDDEN_SIZE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            initializer_range=0.06,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
