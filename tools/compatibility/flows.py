"""What takes several methods, or calls that public methods do not offer."""

import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calls
import tinker
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.resources.models import AsyncModelsResource
from world import ALIAS, MODEL, RANK, TOKENS, World, adam, datum, prompt, settle

Flow = Callable[[World], None]


def applicable(world: World) -> Iterator[tuple[str, Flow]]:
    """Yield the title of each flow that the installed SDK can do, and the flow."""
    yield "a training loop whose requests overlap", train
    yield "a batch in several chunks", several_chunks
    yield "losses importance_sampling, ppo, cispo", policy_losses
    yield "several clients of a session at once", several_clients
    yield "a model's alias", use_alias
    yield "full fine-tuning with rank=0", fine_tune_fully
    yield "a pickled SamplingClient", pickle_client
    yield "`tinker run list`, `checkpoint list` and `checkpoint info`", use_command
    yield "`tinker checkpoint download`", download
    yield "an error of the server reaches the caller", show_error
    if hasattr(tinker.ServiceClient, "__enter__"):
        yield "with ServiceClient()", use_context
    if hasattr(AsyncModelsResource, "unload"):
        yield "AsyncTinker.models.unload", unload
    for name, named in calls.options_of_sample(world):
        yield f"SamplingClient.sample({name}=)", _sample_with(named)
    if calls.accepts(tinker.TrainingClient.save_state, "overwrite"):
        yield "TrainingClient.save_state(overwrite=)", overwrite


def train(world: World) -> None:
    """Send steps without waiting for the results of earlier ones; the loss must fall."""
    client = world.training()
    passes, steps = [], []
    for _ in range(4):
        passes.append(client.forward_backward([datum()], "cross_entropy"))
        steps.append(client.optim_step(adam()))
    losses = [settle(each).metrics["loss:sum"] for each in passes]
    assert all(settle(step) is not None for step in steps)
    assert losses == sorted(losses, reverse=True), losses


def several_chunks(world: World) -> None:
    """Send more examples than the SDK sends in one request."""
    client = world.training()
    data = [datum([1 + number % 200, 2, 3]) for number in range(1100)]
    result = settle(client.forward_backward(data, "cross_entropy"))
    assert len(result.loss_fn_outputs) == len(data)
    total = -sum(sum(each["logprobs"].data) for each in result.loss_fn_outputs)
    assert math.isclose(result.metrics["loss:sum"], total, rel_tol=1e-3)


def policy_losses(world: World) -> None:
    """Train with the losses of reinforcement learning."""
    client = world.training()
    count = len(TOKENS) - 1
    example = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": TOKENS[1:],
            "logprobs": [-1.0] * count,
            "advantages": [1.0] * count,
        },
    )
    for name in ("importance_sampling", "ppo", "cispo"):
        result = settle(client.forward_backward([example], name))
        assert math.isfinite(result.metrics["loss:sum"]), name


def several_clients(world: World) -> None:
    """Train two models of a session alternately."""
    first, second = world.training(), world.training()
    assert first.model_id != second.model_id
    pending = [client.forward_backward([datum()], "cross_entropy") for client in (first, second)]
    one, other = [settle(each).metrics["loss:sum"] for each in pending]
    assert math.isclose(one, other, rel_tol=1e-4)


def use_alias(world: World) -> None:
    """Train and sample a model under its alias, and load the tokenizer."""
    client = settle(world.service.create_lora_training_client(ALIAS, rank=RANK))
    settle(client.forward_backward([datum()], "cross_entropy"))
    assert client.get_tokenizer().encode("text")
    sampling = settle(world.service.create_sampling_client(base_model=ALIAS))
    assert sampling.get_tokenizer().encode("text")
    assert settle(sampling.compute_logprobs(prompt()))[0] is None


def fine_tune_fully(world: World) -> None:
    """Train all parameters of a model."""
    client = settle(world.service.create_lora_training_client(MODEL, rank=0))
    assert not client.get_info().is_lora
    before = settle(client.forward_backward([datum()], "cross_entropy")).metrics["loss:sum"]
    settle(client.optim_step(adam()))
    after = settle(client.forward([datum()], "cross_entropy")).metrics["loss:sum"]
    assert after < before, (before, after)


def pickle_client(world: World) -> None:
    """Use a sampling client after it was sent to another process."""
    client: Any = pickle.loads(pickle.dumps(world.sampling))  # noqa: S301 - its own bytes
    calls.check_sample(client)


def show_error(world: World) -> None:
    """Request a loss that does not exist; the message must name it, at once."""
    client = world.training()
    message = ""
    try:
        settle(client.forward_backward([datum()], "no_such_loss"))
    except Exception as error:  # noqa: BLE001 - the type differs between versions
        message = str(error)
    assert "no_such_loss" in message, message


def use_command(world: World) -> None:
    """List runs and checkpoints with the SDK's command."""
    path = world.state_path
    run_id = str(world.trained.model_id)
    assert run_id in _tinker("run", "list", "--limit=1000")
    assert path in _tinker("checkpoint", "list", f"--run-id={run_id}")
    assert path in _tinker("checkpoint", "info", path)


def download(world: World) -> None:
    """Download a checkpoint with the SDK's command: for sampling in old ones, else for training."""
    is_archive = hasattr(world.rest, "get_checkpoint_archive_url")
    path = world.sampler_path if is_archive else world.state_path
    with tempfile.TemporaryDirectory() as folder:
        _tinker("checkpoint", "download", path, f"--output={folder}")
        files = [file.name for file in Path(folder).rglob("*")]
    assert "adapter_config.json" in files, files


def _tinker(*arguments: str) -> str:
    """Return the output of the SDK's command."""
    result = subprocess.run(  # noqa: S603 - the command of this environment
        [str(Path(sys.executable).with_name("tinker")), "--format=json", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
    )
    print(result.stdout, result.stderr, file=sys.stderr)
    output = (result.stderr.strip() or result.stdout.strip()).splitlines()
    # Commands of old SDKs sometimes abort at exit, after their whole output.
    assert result.returncode in {0, -signal.SIGABRT}, f"status {result.returncode}: {output[-1:]}"
    return result.stdout


def use_context(_world: World) -> None:
    """Use a client as a context manager."""
    with tinker.ServiceClient() as client:
        assert settle(client.create_sampling_client(base_model=MODEL)) is not None


def unload(world: World) -> None:
    """Delete a model through the client of resources, the only place that offers it."""
    holder: Any = world.service.holder
    model_id = world.training().model_id

    async def send() -> Any:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            return await client.models.unload(request=types.UnloadModelRequest(model_id=model_id))

    assert settle(holder.run_coroutine_threadsafe(send())).request_id


def overwrite(world: World) -> None:
    """Replace a checkpoint."""
    client: Any = world.trained
    name = world.name()
    first = settle(client.save_state(name)).path
    assert settle(client.save_state(name, overwrite=True)).path == first


def _sample_with(named: dict[str, Any]) -> Flow:
    def sample(world: World) -> None:
        settings = types.SamplingParams(max_tokens=2, temperature=1.0)
        result = settle(
            world.sampling.sample(prompt(), 1, settings, include_prompt_logprobs=True, **named)
        )
        assert len(result.sequences) == 1

    return sample
