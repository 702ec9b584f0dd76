"""Train one step with the SDK, as a user would; without BASE_MODEL only list the models."""

import os
import sys

import tinker
from tinker import types

MODEL = os.environ["BASE_MODEL"]
TIMEOUT_SECONDS = float(os.environ["TIMEOUT_SECONDS"])


def report(line: str) -> None:
    """Write a line for `helm test --logs`."""
    sys.stdout.write(f"{line}\n")


def main() -> None:
    """List the models, and train one of them if BASE_MODEL is set."""
    with tinker.ServiceClient() as service:
        served = [model.model_name for model in service.get_server_capabilities().supported_models]
        report(f"served: {', '.join(map(str, served)) or 'nothing yet'}")
        if MODEL:
            train(service)


def train(service: tinker.ServiceClient) -> None:
    """Train one step, and exit with an error unless the loss decreases."""
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
        sys.exit(f"the loss did not decrease after one step: {first} -> {second}")


main()
