"""This server compared with another Tinker server, through the SDK: the same steps, in turn.

`PEER_URL` is the other server's address, `PEER_API_KEY` a key for it, and `PEER_MODEL` a base model
that it serves. Ours serves the folder of `MODEL_FOLDER` under that name, so it should be the same
model; the peer's machine is its own, and a note says where it is.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement, medians
from tinkercloud_testing.serving.servers import a_server

_STEPS = 5
_TOKENS = 64
_SMALLEST_VOCABULARY = 100
"""Token ids below this exist in every base model."""


def measure(folder: str) -> Iterator[Measurement]:
    """Compare with the peer that `PEER_URL` names; measure nothing without one.

    Args:
        folder: the base model of our server.
    """
    url = os.environ.get("PEER_URL")
    if url is None:
        return
    model = os.environ["PEER_MODEL"]
    with (
        tinker.ServiceClient(base_url=url, api_key=os.environ["PEER_API_KEY"]) as peer,
        tempfile.TemporaryDirectory() as state,
        a_server(Path(state), {model: Path(folder)}) as server,
    ):
        clients = (server.client(), peer)
        trainings = [each.create_lora_training_client(model, rank=4).result() for each in clients]
        note = f"the peer is {url}"
        ours, theirs = medians(*(lambda of=each: _steps(of) for each in trainings))
        yield Measurement(
            "P1", "pipelined steps/s of ours / the peer's", theirs / ours, "x", ">= 1", "", note
        )
        samplers = [each.save_weights_and_get_sampling_client().result() for each in trainings]
        ours, theirs = medians(*(lambda of=each: _sample(of) for each in samplers))
        yield Measurement(
            "P2", "tokens/s sampled of ours / the peer's", theirs / ours, "x", ">= 1", "", note
        )


def _steps(training: tinker.TrainingClient) -> None:
    tokens = np.random.default_rng(0).integers(0, _SMALLEST_VOCABULARY, _TOKENS + 1).tolist()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": types.TensorData.from_numpy(np.ones(_TOKENS, np.float32)),
        },
    )
    waiting: list[tinker.APIFuture[Any]] = []
    for _ in range(_STEPS):
        waiting.append(training.forward_backward([datum] * 4, "cross_entropy"))
        waiting.append(training.optim_step(types.AdamParams()))
    for each in waiting:
        each.result()


def _sample(sampler: tinker.SamplingClient) -> None:
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=_TOKENS, temperature=1.0, seed=1)
    sampler.sample(prompt, num_samples=4, sampling_params=params).result()
