"""Reinforcement learning: a small policy-gradient loop with the `importance_sampling` loss.

The prompt asks for a colour in one word. The reward is 1 if the first six tokens name one; before
training the model mostly talks about the question.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

QUESTION = "Name a colour. Answer with one word."
COLOURS = {
    "black", "blue", "brown", "coral", "gold", "gray", "green", "grey", "indigo", "orange", "pink",
    "purple", "red", "silver", "teal", "turquoise", "violet", "white", "yellow",
}  # fmt: skip
GROUP_SIZE = 16


@dataclass
class PolicyGradient:
    """A training run with its client and reward history."""

    client: tinker.ServiceClient
    model: str
    rewards: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.training = self.client.create_lora_training_client(
            base_model=self.model, rank=16, seed=2
        ).result()
        self.tokenizer: PreTrainedTokenizerBase = self.training.get_tokenizer()
        message = {"role": "user", "content": QUESTION}
        text = self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        self.prompt = self.tokenizer.encode(text, add_special_tokens=False)

    def train(self, steps: int) -> Iterator[float]:
        """Yield the mean reward of each step."""
        for step in range(steps):
            sampler = self.training.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=6, seed=1000 * step)
            prompt = types.ModelInput.from_ints(self.prompt)
            group = sampler.sample(prompt, GROUP_SIZE, params).result().sequences
            rewards = [self.reward(sequence) for sequence in group]
            mean = sum(rewards) / len(rewards)
            data = [
                self.datum(sequence, reward - mean)
                for sequence, reward in zip(group, rewards, strict=True)
            ]
            self.training.forward_backward(data, "importance_sampling")
            self.training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            self.rewards.append(mean)
            yield mean

    def reward(self, sequence: types.SampledSequence) -> float:
        """Return 1 if a sample names a colour, otherwise 0."""
        text = self.tokenizer.decode(sequence.tokens, skip_special_tokens=True).lower()
        return float(not COLOURS.isdisjoint(re.findall(r"[a-z]+", text)))

    def datum(self, sequence: types.SampledSequence, advantage: float) -> types.Datum:
        """Return a rollout as training data; prompt tokens have advantage zero."""
        tokens = [*self.prompt, *sequence.tokens]
        zeros = [0.0] * (len(self.prompt) - 1)
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "logprobs": [*zeros, *sequence.logprobs],
                "advantages": [*zeros, *[advantage] * len(sequence.tokens)],
            },
        )
