"""What the calls of one SDK version work on: clients, data, checkpoints. All made on first use.

Runs in the environment of any SDK version, so only its standard library and the SDK are imported.
"""

import asyncio
import concurrent.futures
import inspect
import itertools
import os
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

import tinker
from tinker import types

MODEL = os.environ["COMPATIBILITY_MODEL"]
ALIAS = os.environ["COMPATIBILITY_ALIAS"]
TIMEOUT_SECONDS = 30.0
RANK = 4
TOKENS = list(b"a few tokens of text")
DEFAULT_LEARNING_RATE = 0.01

Call = Callable[..., Any]


async def _settle_async(value: Any) -> Any:
    """Await what an `_async` method returned, and the future that it may have resolved to."""
    while True:
        if inspect.iscoroutine(value) or inspect.isawaitable(value):
            value = await value
        elif isinstance(value, concurrent.futures.Future):
            value = await asyncio.wrap_future(value)
        elif hasattr(value, "result_async"):
            value = await value.result_async(timeout=TIMEOUT_SECONDS)
        else:
            return value


def settle(value: Any) -> Any:
    """Return the result of a call: a value, a future, or a coroutine that resolves to either."""
    if inspect.iscoroutine(value):

        async def run(waiting: Awaitable[Any]) -> Any:
            return await _settle_async(waiting)

        return asyncio.run(run(value))
    while hasattr(value, "result") and callable(value.result):
        value = value.result(timeout=TIMEOUT_SECONDS)
    return value


def bound(client: object, name: str) -> Call:
    """Return a method of a client that returns results instead of futures."""
    method = getattr(client, name)

    def call(*positional: object, **named: object) -> Any:
        if inspect.iscoroutinefunction(method):

            async def run() -> Any:
                return await _settle_async(method(*positional, **named))

            return asyncio.run(run())
        return settle(method(*positional, **named))

    call.__name__ = name
    return call


def accepts(method: object, parameter: str) -> bool:
    """Whether a method of this SDK version has a parameter."""
    return callable(method) and parameter in inspect.signature(method).parameters


def datum(tokens: list[int] | None = None) -> types.Datum:
    """Return an example for cross-entropy."""
    text = tokens or TOKENS
    return types.Datum(
        model_input=types.ModelInput.from_ints(text[:-1]),
        loss_fn_inputs={"target_tokens": text[1:], "weights": [1.0] * (len(text) - 1)},
    )


def prompt() -> types.ModelInput:
    """Return a prompt."""
    return types.ModelInput.from_ints(TOKENS)


def adam() -> types.AdamParams:
    """Return the hyperparameters of a step."""
    return types.AdamParams(learning_rate=DEFAULT_LEARNING_RATE)


class World:
    """Clients and checkpoints of one SDK version."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def name(self) -> str:
        """Return an unused name of a checkpoint."""
        return f"checkpoint-{next(self._numbers)}"

    @cached_property
    def service(self) -> tinker.ServiceClient:
        """The client whose session most calls share."""
        return tinker.ServiceClient()

    @cached_property
    def rest(self) -> Any:
        """A client of the REST calls."""
        return self.service.create_rest_client()

    def training(self) -> Any:
        """Return a new model, so that a failed call does not disturb the next one."""
        return settle(self.service.create_lora_training_client(MODEL, rank=RANK))

    @cached_property
    def trained(self) -> Any:
        """A model with one training step."""
        client = self.training()
        settle(client.forward_backward([datum()], "cross_entropy"))
        settle(client.optim_step(adam()))
        return client

    @cached_property
    def state_path(self) -> str:
        """A training checkpoint."""
        return str(settle(self.trained.save_state(self.name())).path)

    @cached_property
    def sampler_path(self) -> str:
        """A checkpoint for sampling."""
        return str(settle(self.trained.save_weights_for_sampler(self.name())).path)

    @cached_property
    def sampling(self) -> Any:
        """A sampling client of the base model."""
        return settle(self.service.create_sampling_client(base_model=MODEL))

    @property
    def session_id(self) -> str:
        """The session of the shared client."""
        return str(self.trained.model_id).partition(":")[0]

    def new_checkpoint(self) -> str:
        """Return the path of a training checkpoint of its own."""
        return str(settle(self.trained.save_state(self.name())).path)
