"""How each public method of the SDK is exercised, and what its result must be.

A call is written once and serves both forms of a method: `do` is bound to `save_state` or to
`save_state_async`, and returns the final result in either case.
"""

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import tinker
from tinker import types
from world import (
    MODEL,
    RANK,
    TOKENS,
    World,
    accepts,
    adam,
    bound,
    datum,
    prompt,
    settle,
)

Exercise = Callable[[World, Callable[..., Any]], None]
Maker = Callable[[World], object]

SERVICE, TRAINING = "ServiceClient", "TrainingClient"
SAMPLING, REST = "SamplingClient", "RestClient"

CLIENTS: dict[str, Maker] = {
    SERVICE: lambda world: world.service,
    TRAINING: lambda world: world.training(),
    SAMPLING: lambda world: world.sampling,
    REST: lambda world: world.rest,
}
"""How the client of a method is made, by its class."""
CALLS: dict[str, Exercise] = {}
"""Exercises by `Class.method`, without the suffix `_async`."""


def exercise(*names: str) -> Callable[[Exercise], Exercise]:
    """Register how methods are exercised."""

    def register(function: Exercise) -> Exercise:
        CALLS.update(dict.fromkeys(names, function))
        return function

    return register


def run(world: World, class_name: str, method: str) -> None:
    """Exercise one form of a method.

    Raises:
        Exception: any exception of the SDK; AssertionError if the result is wrong.
    """
    client = CLIENTS[class_name](world)
    CALLS[f"{class_name}.{method.removesuffix('_async')}"](world, bound(client, method))


def is_known(class_name: str, method: str) -> bool:
    """Whether there is an exercise for a method."""
    return f"{class_name}.{method.removesuffix('_async')}" in CALLS


def _loss(output: Any) -> float:
    """Return the loss of a forward or backward pass, and check its form."""
    (record,) = output.loss_fn_outputs
    logprobs = record["logprobs"].data
    assert len(logprobs) == len(TOKENS) - 1, f"{len(logprobs)} logprobs"
    loss = output.metrics["loss:sum"]
    assert math.isclose(loss, -sum(logprobs), rel_tol=1e-3), (loss, sum(logprobs))
    return float(loss)


@exercise("ServiceClient.get_server_capabilities", "RestClient.get_server_capabilities")
def _(world: World, do: Callable[..., Any]) -> None:
    assert MODEL in [model.model_name for model in do().supported_models]


@exercise("ServiceClient.create_lora_training_client")
def _(world: World, do: Callable[..., Any]) -> None:
    client = do(MODEL, rank=RANK, seed=1, user_metadata={"purpose": "test"})
    assert client.get_info().lora_rank == RANK


@exercise("ServiceClient.create_training_client_from_state")
@exercise("ServiceClient.create_training_client_from_state_with_optimizer")
def _(world: World, do: Callable[..., Any]) -> None:
    client = do(world.state_path)
    before = _loss(settle(world.trained.forward([datum()], "cross_entropy")))
    after = _loss(settle(client.forward([datum()], "cross_entropy")))
    assert math.isclose(before, after, rel_tol=1e-5), (before, after)


@exercise("ServiceClient.create_sampling_client")
def _(world: World, do: Callable[..., Any]) -> None:
    check_sample(do(base_model=MODEL))
    check_sample(do(model_path=world.sampler_path))


@exercise("ServiceClient.create_rest_client")
def _(world: World, do: Callable[..., Any]) -> None:
    assert isinstance(settle(do().list_sessions(limit=1)).sessions, list)


@exercise(
    "ServiceClient.get_telemetry",
    "TrainingClient.get_telemetry",
    "SamplingClient.get_telemetry",
    "RestClient.get_telemetry",
)
def _(world: World, do: Callable[..., Any]) -> None:
    telemetry = do()
    if telemetry is not None:
        assert telemetry.log("compatibility", event_data={"is": "a test"})


@exercise("ServiceClient.close")
def _(world: World, do: Callable[..., Any]) -> None:
    client = tinker.ServiceClient()
    settle(client.create_lora_training_client(MODEL, rank=RANK))
    bound(client, do.__name__)("success")


@exercise("ServiceClient.get_console_url", "TrainingClient.get_console_url")
def _(world: World, do: Callable[..., Any]) -> None:
    assert world.session_id in do()


@exercise("ServiceClient.copy_weights", "RestClient.copy_weights")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do(world.state_path).startswith("tinker://")


@exercise("ServiceClient.create_custom_loss")
def _(world: World, do: Callable[..., Any]) -> None:
    def loss(logprobs: Any, weights: Any) -> Any:
        return -(logprobs * weights).sum(), {}

    assert do(loss, {"logprobs": 1, "weights": 1}) is not None


@exercise("TrainingClient.forward", "TrainingClient.forward_backward")
def _(world: World, do: Callable[..., Any]) -> None:
    first = _loss(do([datum()], "cross_entropy"))
    assert math.isclose(first, _loss(do([datum()], "cross_entropy")), rel_tol=1e-5)


@exercise("TrainingClient.forward_backward_custom")
def _(world: World, do: Callable[..., Any]) -> None:
    def loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        assert len(data) == len(logprobs) == 1
        return -logprobs[0].sum(), {"tokens:sum": float(len(logprobs[0]))}

    assert do([datum()], loss).metrics["tokens:sum"] == len(TOKENS) - 1


@exercise("TrainingClient.optim_step")
def _(world: World, do: Callable[..., Any]) -> None:
    client = world.training()
    before = _loss(settle(client.forward_backward([datum()], "cross_entropy")))
    bound(client, do.__name__)(adam())
    after = _loss(settle(client.forward([datum()], "cross_entropy")))
    assert after < before, (before, after)


@exercise("TrainingClient.save_state")
def _(world: World, do: Callable[..., Any]) -> None:
    assert "/weights/" in do(world.name(), ttl_seconds=7200).path


@exercise("TrainingClient.load_state", "TrainingClient.load_state_with_optimizer")
def _(world: World, do: Callable[..., Any]) -> None:
    do(world.state_path)


@exercise("TrainingClient.save_weights_for_sampler")
def _(world: World, do: Callable[..., Any]) -> None:
    assert "/sampler_weights/" in do(world.name(), ttl_seconds=7200).path


@exercise("TrainingClient.save_weights_external")
def _(world: World, do: Callable[..., Any]) -> None:
    assert "/external_weights/" in do(world.name(), ttl_seconds=7200).path


@exercise(
    "TrainingClient.save_weights_and_get_sampling_client",
    "TrainingClient.save_weights_and_get_sampling_client_submit",
)
def _(world: World, do: Callable[..., Any]) -> None:
    check_sample(do())


@exercise("TrainingClient.get_info")
def _(world: World, do: Callable[..., Any]) -> None:
    info = do()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (MODEL, True, RANK)


@exercise("TrainingClient.get_tokenizer", "SamplingClient.get_tokenizer")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do().encode("text")


@exercise("TrainingClient.create_sampling_client")
def _(world: World, do: Callable[..., Any]) -> None:
    check_sample(do(world.sampler_path))


def check_sample(client: Any) -> None:
    """Sample from a client."""
    settings = types.SamplingParams(max_tokens=3, temperature=1.0, seed=1)
    result = settle(client.sample(prompt(), 1, settings))
    (sequence,) = result.sequences
    assert 0 < len(sequence.tokens) <= 3, sequence


@exercise("SamplingClient.sample")
def _(world: World, do: Callable[..., Any]) -> None:
    settings = types.SamplingParams(max_tokens=3, temperature=0.7, top_k=5, stop=[256])
    result = do(prompt(), 2, settings, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    assert len(result.sequences) == 2
    for sequence in result.sequences:
        assert len(sequence.logprobs) == len(sequence.tokens) <= 3, sequence
        assert sequence.stop_reason in {"stop", "length"}
    assert len(result.prompt_logprobs) == len(TOKENS), result.prompt_logprobs
    assert result.prompt_logprobs[0] is None, result.prompt_logprobs
    assert [len(each) for each in result.topk_prompt_logprobs[1:]] == [2] * (len(TOKENS) - 1)


@exercise("SamplingClient.compute_logprobs")
def _(world: World, do: Callable[..., Any]) -> None:
    logprobs = do(prompt())
    assert logprobs[0] is None, logprobs
    assert all(logprob <= 0 for logprob in logprobs[1:]), logprobs


@exercise("SamplingClient.create")
def _(world: World, do: Callable[..., Any]) -> None:
    check_sample(do(world.service.holder, base_model=MODEL))


@exercise("SamplingClient.get_base_model")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do() == MODEL


@exercise("SamplingClient.get_sampler_handle", "SamplingClient.from_sampler_handle")
def _(world: World, do: Callable[..., Any]) -> None:
    sampling: Any = world.sampling
    handle = sampling.get_sampler_handle()
    check_sample(settle(type(sampling).from_sampler_handle(handle)))


@exercise("RestClient.get_training_run")
def _(world: World, do: Callable[..., Any]) -> None:
    run = do(world.trained.model_id)
    assert (run.base_model, run.is_lora, run.lora_rank) == (MODEL, True, RANK)


@exercise("RestClient.get_training_run_by_tinker_path")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do(world.state_path).training_run_id == world.trained.model_id


@exercise("RestClient.get_weights_info_by_tinker_path")
def _(world: World, do: Callable[..., Any]) -> None:
    info = do(world.state_path)
    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, RANK)


@exercise("RestClient.list_training_runs")
def _(world: World, do: Callable[..., Any]) -> None:
    wanted = world.trained.model_id
    assert wanted in [run.training_run_id for run in do(limit=100).training_runs]


@exercise("RestClient.list_checkpoints")
def _(world: World, do: Callable[..., Any]) -> None:
    path = world.state_path
    assert path in list(_paths(do(world.trained.model_id)))


@exercise("RestClient.list_user_checkpoints")
def _(world: World, do: Callable[..., Any]) -> None:
    path = world.new_checkpoint()
    assert path in list(_paths(do(limit=100)))


def _paths(listing: Any) -> Iterator[str]:
    for checkpoint in listing.checkpoints:
        assert checkpoint.checkpoint_type in {"training", "sampler", "external"}
        assert isinstance(checkpoint.time, datetime)
        yield checkpoint.tinker_path


@exercise("RestClient.get_checkpoint_archive_url")
def _(world: World, do: Callable[..., Any]) -> None:
    name = world.sampler_path.rpartition("/")[2]
    answer = do(world.trained.model_id, f"sampler_weights/{name}")
    assert answer.url.startswith("http"), answer


@exercise("RestClient.get_checkpoint_archive_url_from_tinker_path")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do(world.sampler_path).url.startswith("http")


@exercise("RestClient.get_external_weights_urls")
def _(world: World, do: Callable[..., Any]) -> None:
    path = settle(world.trained.save_weights_external(world.name(), ttl_seconds=7200)).path
    assert do(path).urls


@exercise("RestClient.delete_checkpoint")
def _(world: World, do: Callable[..., Any]) -> None:
    path = world.new_checkpoint()
    do(world.trained.model_id, "weights/" + path.rpartition("/")[2])
    assert path not in list(_paths(settle(world.rest.list_checkpoints(world.trained.model_id))))


@exercise("RestClient.delete_checkpoint_from_tinker_path")
def _(world: World, do: Callable[..., Any]) -> None:
    path = world.new_checkpoint()
    do(path)
    assert path not in list(_paths(settle(world.rest.list_checkpoints(world.trained.model_id))))


@exercise(
    "RestClient.publish_checkpoint_from_tinker_path",
    "RestClient.unpublish_checkpoint_from_tinker_path",
)
def _(world: World, do: Callable[..., Any]) -> None:
    path = world.new_checkpoint()
    if do.__name__.startswith("un"):
        settle(world.rest.publish_checkpoint_from_tinker_path(path))
    do(path)
    listed = settle(world.rest.list_checkpoints(world.trained.model_id)).checkpoints
    (checkpoint,) = [each for each in listed if each.tinker_path == path]
    assert checkpoint.public == (not do.__name__.startswith("un"))


@exercise("RestClient.set_checkpoint_ttl_from_tinker_path")
def _(world: World, do: Callable[..., Any]) -> None:
    do(world.new_checkpoint(), 7200)


@exercise("RestClient.get_session")
def _(world: World, do: Callable[..., Any]) -> None:
    assert world.trained.model_id in do(world.session_id).training_run_ids


@exercise("RestClient.list_sessions")
def _(world: World, do: Callable[..., Any]) -> None:
    assert world.session_id in do(limit=100).sessions


@exercise("RestClient.get_sampler")
def _(world: World, do: Callable[..., Any]) -> None:
    assert world.sampling is not None
    sampler_id = settle(world.rest.get_session(world.session_id)).sampler_ids[0]
    assert do(sampler_id).base_model == MODEL


@exercise("RestClient.assign_session_project")
def _(world: World, do: Callable[..., Any]) -> None:
    do(world.session_id, "a-project")
    runs = settle(world.rest.list_training_runs(limit=100, project_id="a-project")).training_runs
    assert world.trained.model_id in [run.training_run_id for run in runs]


@exercise("RestClient.search_sessions")
def _(world: World, do: Callable[..., Any]) -> None:
    make: Any = types.SessionSearchRequest
    assert do(make(limit=10)).sessions


@exercise("RestClient.whoami")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do() is not None


@exercise("RestClient.export_session_trace")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do(world.session_id).startswith("http")


@exercise("RestClient.get_audit_log")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do().entries is not None


@exercise("RestClient.get_billing_usage")
def _(world: World, do: Callable[..., Any]) -> None:
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    assert do(end - timedelta(hours=1), end).data is not None


@exercise("RestClient.get_current_checkpoint_storage_usage")
def _(world: World, do: Callable[..., Any]) -> None:
    assert do().data is not None


def options_of_sample(world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options of `sample` that only some versions have, with a value of each."""
    last = len(TOKENS) - 1
    wanted = {
        "topk_sample_logprobs": 2,
        "prompt_alt_tokens_k": 2,
        "prompt_logprobs_last_n": 3,
        "target_prompt_logprobs": types.TensorData(
            data=[*TOKENS[1:]], dtype="int64", shape=[last, 1]
        ),
    }
    method = world.sampling.sample
    for name, value in wanted.items():
        if accepts(method, name):
            yield name, {name: value}
