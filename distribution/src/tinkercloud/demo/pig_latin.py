"""Supervised fine-tuning: teach the model pig latin from a dozen pairs."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

WORDS = [
    "banana", "river", "window", "garden", "pencil", "summer", "market", "doctor",
    "hammer", "letter", "monkey", "silver",
]  # fmt: skip
PROBES = ["banana", "pencil", "monkey"]


def pig_latin(word: str) -> str:
    """Return the pig latin form of a word that begins with a single consonant."""
    return f"{word[1:]}{word[0]}ay"


def completion_datum(prompt: list[int], completion: list[int]) -> types.Datum:
    """Return a supervised example whose loss covers the completion only."""
    tokens = [*prompt, *completion]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


@dataclass
class PigLatin:
    """A training run with its client, data and loss history."""

    client: tinker.ServiceClient
    model: str
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.training = self.client.create_lora_training_client(
            base_model=self.model, rank=16, seed=1
        ).result()
        self.tokenizer: PreTrainedTokenizerBase = self.training.get_tokenizer()
        self.data = [
            completion_datum(self.prompt(word), self.encode(f" {pig_latin(word)}\n"))
            for word in WORDS
        ]
        self.num_targets = sum(sum(d.loss_fn_inputs["weights"].data) for d in self.data)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, word: str) -> list[int]:
        """Return the tokens of the question for a word."""
        return self.encode(f"English: {word}\nPig Latin:")

    def train(self, steps: int) -> Iterator[float]:
        """Yield the mean loss per token of each step."""
        for _ in range(steps):
            # Both requests are sent before the first result is awaited.
            step = self.training.forward_backward(self.data, "cross_entropy")
            applied = self.training.optim_step(types.AdamParams(learning_rate=2e-3))
            loss = step.result().metrics["loss:sum"] / self.num_targets
            applied.result()
            self.losses.append(loss)
            yield loss

    def answers(self) -> dict[str, str]:
        """Return the greedy answers to a few words."""
        sampler = self.training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=10, temperature=0, stop=["\n"])
        futures = {
            word: sampler.sample(types.ModelInput.from_ints(self.prompt(word)), 1, params)
            for word in PROBES
        }
        return {
            word: self.tokenizer.decode(future.result().sequences[0].tokens).strip()
            for word, future in futures.items()
        }
