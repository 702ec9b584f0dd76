"""From groups of responses to training data: pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from tinker import types

from tinkercloud_programs.rlve.problems import Outcome, Problem

_SMALL = 1e-6


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Group:
    """A problem and all sampled responses to it."""

    problem: Problem
    prompt: Sequence[int]
    responses: Sequence[Response]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the responses."""
        return [response.outcome.reward for response in self.responses]

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the responses."""
        return fmean(response.outcome.accuracy for response in self.responses)

    @property
    def is_uniform(self) -> bool:
        """Whether all responses have the same reward, so that nothing can be learnt from them."""
        return max(self.rewards) - min(self.rewards) < _SMALL


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return how much better each reward is than its group's mean, in standard deviations."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (deviation + _SMALL) for reward in rewards]


def data_of(groups: Sequence[Group]) -> list[types.Datum]:
    """Return the data of one importance_sampling step.

    Advantages are divided by the number of responses, so that the step does not depend on it.
    """
    number = sum(len(group.responses) for group in groups)
    return [
        _datum(group.prompt, response, advantage / number)
        for group in groups
        if not group.is_uniform
        for response, advantage in zip(group.responses, advantages(group.rewards), strict=True)
        if response.tokens
    ]


def _datum(prompt: Sequence[int], response: Response, advantage: float) -> types.Datum:
    tokens = [*prompt, *response.tokens]
    before = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]
            ),
            "logprobs": _floats([0.0] * before + list(response.logprobs)),
            "advantages": _floats([0.0] * before + [advantage] * len(response.tokens)),
        },
    )


def _floats(values: list[float]) -> types.TensorData:
    return types.TensorData(data=values, dtype="float32", shape=[len(values)])
