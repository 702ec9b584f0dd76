"""A graceful stop loses nothing: clients wait and continue with bitwise identical results."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.serving.servers import TRAINERS, Server, a_server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(scope="module")
def own_server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, trainer: str
) -> Iterator[Server]:
    """Run a server that these tests stop and start."""
    state_dir = tmp_path_factory.mktemp("state")
    with a_server(state_dir, {MODEL: model_folder}, TRAINERS[trainer]) as running:
        yield running


def a_training_client(server: Server) -> tinker.TrainingClient:
    client = server.client()
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def restart(server: Server) -> None:
    server.stop()
    server.start()


def suspended_files(server: Server, training: tinker.TrainingClient) -> list[Path]:
    runs = server.state_dir / "checkpoints" / "runs"
    return sorted(runs.glob(f"{training.model_id}/suspended/**/*.*"))


def in_the_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_training_continues_unchanged_through_a_restart(
    own_server: Server,
) -> None:
    uninterrupted = a_training_client(own_server)
    expected = [step(uninterrupted) for _ in range(5)]
    training = a_training_client(own_server)
    losses = [step(training) for _ in range(2)]

    restart(own_server)

    session = training.holder.get_session_id()
    usage = own_server.request("GET", f"/api/v1/session_usage/{session}").json()
    (model,) = [each for each in usage["models"] if each["model_id"] == training.model_id]
    assert (model["state"], model["step"], model["memory_bytes"]) == ("suspended", 2, 0)
    losses += [step(training) for _ in range(2)]
    restart(own_server)
    losses += [step(training)]
    assert losses == expected
    assert own_server.rest().list_checkpoints(training.model_id).result().checkpoints == []


@pytest.mark.long
def test_a_pending_gradient_survives_a_restart(own_server: Server) -> None:
    def two_parts(training: tinker.TrainingClient, between: Callable[[], None]) -> float:
        step(training)
        first = training.forward_backward([a_datum(5)], "cross_entropy")
        first.result()
        between()
        training.forward_backward([a_datum(50)], "cross_entropy").result()
        training.optim_step(ADAM).result()
        return step(training)

    expected = two_parts(a_training_client(own_server), lambda: None)

    interrupted = two_parts(a_training_client(own_server), lambda: restart(own_server))

    # Ranks add partial sums in a different order, so the last bits may differ.
    assert interrupted == pytest.approx(expected, rel=1e-6)


def test_pipelined_requests_and_unread_results_survive_a_restart(
    own_server: Server,
) -> None:
    uninterrupted = a_training_client(own_server)
    expected = [step(uninterrupted) for _ in range(30)]
    training = a_training_client(own_server)

    sent, applied = [], []
    for _ in range(30):
        sent.append(training.forward_backward([a_datum(5)], "cross_entropy"))
        applied.append(training.optim_step(ADAM))
    sent[0].result()
    restart(own_server)

    losses = [future.result().metrics["loss:sum"] for future in sent]
    assert losses == expected
    metrics = [future.result().metrics or {} for future in applied]
    assert [each["step"] for each in metrics] == list(range(1, 31))


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
@pytest.mark.long
def test_a_sampling_client_does_not_continue_with_an_overwritten_checkpoint(
    own_server: Server, kind: str
) -> None:
    training = a_training_client(own_server)

    def save(name: str) -> str:
        if kind == "weights":
            return training.save_state(name, overwrite=True).result().path
        return training.save_weights_for_sampler(name).result().path

    meant, kept = save("meant"), save("kept")
    clients = [own_server.client().create_sampling_client(path).result() for path in (meant, kept)]
    logprobs = [client.compute_logprobs(PROMPT).result() for client in clients]
    assert logprobs[0] == logprobs[1]
    step(training)
    if kind == "sampler_weights":
        own_server.rest().delete_checkpoint_from_tinker_path(meant).result()
    assert save("meant") == meant

    restart(own_server)

    with pytest.raises(
        tinker.RequestFailedError, match="of this sampling session are gone"
    ) as refused:
        clients[0].compute_logprobs(PROMPT).result()
    assert refused.value.category is types.RequestErrorCategory.User
    assert clients[1].compute_logprobs(PROMPT).result() == logprobs[1]
    again = own_server.client().create_sampling_client(meant).result()
    assert again.compute_logprobs(PROMPT).result() != logprobs[0]


@pytest.mark.long
def test_a_training_loop_does_not_notice_a_hangup_of_the_server(own_server: Server) -> None:
    uninterrupted = a_training_client(own_server)
    expected = [step(uninterrupted) for _ in range(60)]
    training = a_training_client(own_server)
    heads = own_server.head_pids()

    def hang_up() -> None:
        time.sleep(0.3)
        assert own_server.process is not None
        os.kill(own_server.process.pid, signal.SIGHUP)

    restarter = in_the_background(hang_up)
    losses = [step(training) for _ in range(60)]
    restarter.join()

    assert losses == expected
    assert own_server.head_pids() != heads


@pytest.mark.long
def test_unsaved_samplers_keep_sampling_their_own_version(own_server: Server) -> None:
    params = types.SamplingParams(max_tokens=20, stop=[], seed=3)
    training = a_training_client(own_server)
    step(training)
    first = training.save_weights_and_get_sampling_client().result()
    step(training)
    second = training.save_weights_and_get_sampling_client().result()
    samplers = (first, second)
    before = [s.compute_logprobs(PROMPT).result() for s in samplers]
    sampled = [s.sample(PROMPT, 2, params).result().sequences for s in samplers]
    assert before[0] != before[1]

    restart(own_server)

    assert [s.compute_logprobs(PROMPT).result() for s in samplers] == before
    again = [s.sample(PROMPT, 2, params).result().sequences for s in samplers]
    assert [[s.tokens for s in group] for group in again] == [
        [s.tokens for s in group] for group in sampled
    ]


@pytest.mark.long
def test_samples_in_progress_complete_after_a_restart(model_folder: Path, tmp_path: Path) -> None:
    params = types.SamplingParams(max_tokens=200, stop=[], seed=3)
    settings = {"TINKERCLOUD_TIMINGS__DRAIN_SECONDS": "0.1"}
    with a_server(tmp_path / "state", {MODEL: model_folder}, settings) as server:
        sampler = a_training_client(server).save_weights_and_get_sampling_client().result()
        sampler.sample(PROMPT, 1, params).result()

        sent = [sampler.sample(PROMPT, 8, params) for _ in range(8)]
        time.sleep(0.5)
        restart(server)

        sampled = [future.result() for future in sent]
        assert [len(result.sequences) for result in sampled] == [8] * 8


@pytest.mark.long
def test_a_run_killed_after_resuming_continues_from_its_latest_step(own_server: Server) -> None:
    undisturbed, training = a_training_client(own_server), a_training_client(own_server)
    expected = [step(undisturbed) for _ in range(4)]
    losses = [step(training)]
    restart(own_server)
    losses.append(step(training))
    assert suspended_files(own_server, training)

    own_server.kill_heads()

    losses += [step(training), step(training)]
    assert losses == expected


def test_an_ended_session_leaves_nothing_suspended(own_server: Server) -> None:
    with own_server.client() as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        step(training)
        restart(own_server)
        assert suspended_files(own_server, training)

    assert suspended_files(own_server, training) == []


@pytest.mark.long
def test_a_starting_server_waits_for_a_head_that_is_still_suspending_its_runs(
    own_server: Server,
) -> None:
    uninterrupted = a_training_client(own_server)
    expected = [step(uninterrupted) for _ in range(4)]
    training = a_training_client(own_server)
    losses = [step(training) for _ in range(2)]

    own_server.kill()
    for pid in own_server.head_pids():
        os.kill(pid, signal.SIGTERM)
    own_server.start()

    losses += [step(training) for _ in range(2)]
    assert losses == expected


def test_clients_cannot_address_suspended_state(server: Server) -> None:
    answer = server.post("weights_info", {"tinker_path": "tinker://s:train:0/suspended/manifest"})

    assert answer.status == 400
    assert "'suspended'" in answer.detail
