"""Training steps with the SDK on one short text."""

from collections.abc import Sequence

import numpy as np
import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=0.01)


def a_text(tokens: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """Return a text in which every token except the first is predicted.

    Args:
        tokens: The tokens of the text.
        inputs: The inputs of the loss by name, with a number for each token except the first.
    """
    targets = types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64))
    numbers = {
        name: types.TensorData.from_numpy(np.asarray(values, np.float32))
        for name, values in inputs.items()
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": targets, **numbers},
    )


def a_datum(first: int = 5) -> types.Datum:
    """Return a text of four tokens with a given first token, and its targets."""
    return a_text([first, 6, 7, 8, 9], weights=[1.0] * 4)


def step(training: tinker.TrainingClient, first: int = 5) -> float:
    """Train one step and return the loss before it."""
    result = training.forward_backward([a_datum(first)], "cross_entropy")
    training.optim_step(ADAM).result()
    return result.result().metrics["loss:sum"]


def score(training: tinker.TrainingClient, tokens: Sequence[int]) -> list[float]:
    """Return the trainer's logprobs of every token except the first."""
    output = training.forward([a_text(tokens)], "cross_entropy").result()
    return list(output.loss_fn_outputs[0]["logprobs"].data)
