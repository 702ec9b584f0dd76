"""Train one step with the SDK, as a user would; without BASE_MODEL only ask what is served."""

import os
import sys

import tinker
from tinker import types

MODEL = os.environ["BASE_MODEL"]
TIMEOUT_SECONDS = float(os.environ["TIMEOUT_SECONDS"])


def report(line: str) -> None:
    """Say what `helm test --logs` shows."""
    sys.stdout.write(f"{line}\n")


def main() -> None:
    """Ask, and train unless there is nothing to train on."""
    with tinker.ServiceClient() as service:
        served = [model.model_name for model in service.get_server_capabilities().supported_models]
        report(f"served: {', '.join(map(str, served)) or 'nothing yet'}")
        if MODEL:
            train(service)


def train(service: tinker.ServiceClient) -> None:
    """Train one step, and fail unless the loss falls."""
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"target_tokens": [2, 3, 4, 5]},
    )
    before = training.forward_backward([datum], "cross_entropy").result(timeout=TIMEOUT_SECONDS)
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=TIMEOUT_SECONDS)
    after = training.forward([datum], "cross_entropy").result(timeout=TIMEOUT_SECONDS)
    first, second = before.metrics["loss:sum"], after.metrics["loss:sum"]
    report(f"loss: {first} -> {second}")
    if second >= first:
        sys.exit("one step did not lower the loss")


main()
