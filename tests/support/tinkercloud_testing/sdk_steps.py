"""Steps of training with the SDK, on one short text."""

import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=0.01)


def a_datum(first: int = 5) -> types.Datum:
    """Return a text of four tokens, of which the first may be chosen, and what follows each."""
    return types.Datum(
        model_input=types.ModelInput.from_ints([first, 6, 7, 8]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[6, 7, 8, 9], dtype="int64", shape=[4]),
            "weights": types.TensorData(data=[1.0] * 4, dtype="float32", shape=[4]),
        },
    )


def step(training: tinker.TrainingClient, first: int = 5) -> float:
    """Train one step, and return the loss before it."""
    result = training.forward_backward([a_datum(first)], "cross_entropy")
    training.optim_step(ADAM).result()
    return result.result().metrics["loss:sum"]
