"""A server that is stopped properly loses nothing: its clients wait and go on, bit for bit."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tinker
from tinker import types

from tinkercloud_testing.servers import Server, a_server

MODEL = "tiny/llama"
ADAM = types.AdamParams(learning_rate=0.01)
PROMPT = types.ModelInput.from_ints([5, 6, 7])


def a_datum(first: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([first, 6, 7, 8]),
        loss_fn_inputs={"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4},
    )


def step(training: tinker.TrainingClient, first: int = 5) -> float:
    result = training.forward_backward([a_datum(first)], "cross_entropy")
    training.optim_step(ADAM).result(timeout=90)
    return result.result(timeout=90).metrics["loss:sum"]


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


def test_a_client_trains_on_through_a_restart_as_if_nothing_had_happened(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        uninterrupted = a_training_client(server)
        expected = [step(uninterrupted) for _ in range(5)]
        training = a_training_client(server)
        losses = [step(training) for _ in range(2)]

        restart(server)

        losses += [step(training) for _ in range(2)]
        restart(server)
        losses += [step(training)]
        assert losses == expected
        assert server.rest().list_checkpoints(training.model_id).result().checkpoints == []


def test_a_gradient_that_was_not_applied_survives_a_restart(
    model_folder: Path, tmp_path: Path
) -> None:
    def two_parts(training: tinker.TrainingClient, between: Callable[[], None]) -> float:
        step(training)
        first = training.forward_backward([a_datum(5)], "cross_entropy")
        first.result(timeout=60)
        between()
        training.forward_backward([a_datum(50)], "cross_entropy").result(timeout=90)
        training.optim_step(ADAM).result(timeout=90)
        return step(training)

    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        expected = two_parts(a_training_client(server), lambda: None)

        interrupted = two_parts(a_training_client(server), lambda: restart(server))

        assert interrupted == expected


def test_pipelined_requests_and_results_nobody_has_read_survive_a_restart(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        uninterrupted = a_training_client(server)
        expected = [step(uninterrupted) for _ in range(30)]
        training = a_training_client(server)

        sent = []
        for _ in range(30):
            sent.append(training.forward_backward([a_datum(5)], "cross_entropy"))
            training.optim_step(ADAM)
        sent[0].result(timeout=60)
        restart(server)

        losses = [future.result(timeout=90).metrics["loss:sum"] for future in sent]
        assert losses == expected


def test_a_loop_that_runs_meanwhile_does_not_notice_a_hangup(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        uninterrupted = a_training_client(server)
        expected = [step(uninterrupted) for _ in range(60)]
        training = a_training_client(server)
        heads = server.head_pids()

        def hang_up() -> None:
            time.sleep(0.3)
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGHUP)

        restarter = in_the_background(hang_up)
        losses = [step(training) for _ in range(60)]
        restarter.join()

        assert losses == expected
        assert server.head_pids() != heads


def test_samplers_that_were_never_saved_keep_sampling_their_own_version(
    model_folder: Path, tmp_path: Path
) -> None:
    params = types.SamplingParams(max_tokens=20, stop=[], seed=3)
    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        training = a_training_client(server)
        step(training)
        first = training.save_weights_and_get_sampling_client().result()
        step(training)
        second = training.save_weights_and_get_sampling_client().result()
        samplers = (first, second)
        before = [s.compute_logprobs(PROMPT).result() for s in samplers]
        drawn = [s.sample(PROMPT, 2, params).result().sequences for s in samplers]
        assert before[0] != before[1]

        restart(server)

        assert [s.compute_logprobs(PROMPT).result(timeout=90) for s in samplers] == before
        again = [s.sample(PROMPT, 2, params).result(timeout=90).sequences for s in samplers]
        assert [[s.tokens for s in group] for group in again] == [
            [s.tokens for s in group] for group in drawn
        ]


def test_samples_that_were_being_drawn_are_drawn_after_a_restart(
    model_folder: Path, tmp_path: Path
) -> None:
    params = types.SamplingParams(max_tokens=400, stop=[], seed=3)
    settings = {"TINKERCLOUD_TIMINGS__DRAIN_SECONDS": "0.1"}
    with a_server(tmp_path / "state", {MODEL: model_folder}, settings) as server:
        sampler = a_training_client(server).save_weights_and_get_sampling_client().result()
        sampler.sample(PROMPT, 1, params).result(timeout=90)

        sent = [sampler.sample(PROMPT, 8, params) for _ in range(16)]
        time.sleep(0.5)
        restart(server)

        drawn = [future.result(timeout=110) for future in sent]
        assert [len(result.sequences) for result in drawn] == [8] * 16


def test_a_run_that_was_resumed_and_then_killed_is_lost_and_says_from_where_to_go_on(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        training = a_training_client(server)
        step(training)
        path = training.save_state("one").result().path
        restart(server)
        step(training)
        assert suspended_files(server, training)

        server.kill_heads()

        with pytest.raises((tinker.TinkerError, ValueError), match="has stopped") as raised:
            training.forward_backward([a_datum(5)], "cross_entropy").result(timeout=60)
        assert path in str(raised.value)


def test_a_session_that_is_over_leaves_nothing_suspended(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        with server.client() as client:
            training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
            step(training)
            restart(server)
            assert suspended_files(server, training)

        assert suspended_files(server, training) == []


def test_a_server_that_starts_while_a_head_still_stops_waits_for_what_it_suspends(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path / "state", {MODEL: model_folder}) as server:
        uninterrupted = a_training_client(server)
        expected = [step(uninterrupted) for _ in range(4)]
        training = a_training_client(server)
        losses = [step(training) for _ in range(2)]

        server.kill()
        for pid in server.head_pids():
            os.kill(pid, signal.SIGTERM)
        server.start()

        losses += [step(training) for _ in range(2)]
        assert losses == expected


def test_no_client_can_name_a_suspended_state(server: Server) -> None:
    answer = server.post("weights_info", {"tinker_path": "tinker://s:train:0/suspended/manifest"})

    assert answer.status == 400
    assert "'suspended'" in answer.detail
