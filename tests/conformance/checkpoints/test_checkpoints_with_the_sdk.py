"""Every operation on checkpoints: save, load, resume, list, publish, expire, delete."""

from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/llama"


def a_training_client(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def losses(training: tinker.TrainingClient, count: int) -> list[float]:
    return [step(training) for _ in range(count)]


def test_save_train_load_train_repeats_the_losses_bit_for_bit(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    losses(training, 3)
    path = training.save_state("three").result().path

    first = losses(training, 4)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()

    assert losses(resumed, 4) == first


def add_two(training: tinker.TrainingClient) -> None:
    for first in (20, 30):
        training.forward_backward([a_datum(first)], "cross_entropy").result()


def apply(training: tinker.TrainingClient) -> dict[str, float]:
    metrics = training.optim_step(ADAM).result().metrics
    assert metrics is not None
    return metrics


def test_a_pending_gradient_is_part_of_a_checkpoint(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    losses(training, 2)
    add_two(training)
    path = training.save_state("within-a-step").result().path
    applied, after = apply(training), losses(training, 2)

    resumed = client.create_training_client_from_state_with_optimizer(path).result()

    assert (apply(resumed), losses(resumed, 2)) == (applied, after)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_loading_in_place_replaces_the_gradient_with_the_one_in_the_checkpoint(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    losses(training, 2)
    after_a_step = training.save_state("after-a-step").result().path
    add_two(training)
    within_a_step = training.save_state("within-a-step").result().path
    applied = apply(training)

    training.forward_backward([a_datum(50)], "cross_entropy").result()
    training.load_state_with_optimizer(within_a_step).result()
    assert apply(training) == applied
    training.forward_backward([a_datum(50)], "cross_entropy").result()
    training.load_state_with_optimizer(after_a_step).result()
    assert apply(training)["grad_norm"] == 0


def test_a_checkpoint_loaded_without_the_optimizer_has_no_gradient(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    add_two(training)
    path = training.save_state("within-a-step").result().path

    fresh = client.create_training_client_from_state(path).result()

    assert apply(fresh) == {"grad_norm": 0, "step": 1}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_loading_in_place_restores_the_state(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)
    losses(training, 3)
    path = training.save_state("three").result().path
    first = losses(training, 3)

    training.load_state_with_optimizer(path).result()

    assert losses(training, 3) == first


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_client_can_train_after_a_rejected_load(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)
    path = f"tinker://{training.model_id}/weights/never-saved"

    with pytest.raises(tinker.RequestFailedError, match="does not exist"):
        training.load_state(path).result()

    assert losses(training, 1)


def test_loading_without_the_optimizer_resets_the_moments(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    losses(training, 3)
    path = training.save_state("three").result().path
    first = losses(training, 3)

    fresh = client.create_training_client_from_state(path).result()
    again = losses(fresh, 3)

    assert again[0] == first[0]
    assert again[1] != first[1]


def test_a_named_sampler_checkpoint_keeps_the_weights_it_was_saved_with(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    losses(training, 2)
    text = types.ModelInput.from_ints([5, 6, 7, 8])
    live = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("two").result().path

    losses(training, 3)
    sampler = client.create_sampling_client(model_path=path).result()

    assert sampler.get_base_model() == MODEL
    assert sampler.compute_logprobs(text).result() == live.compute_logprobs(text).result()


def test_a_name_is_overwritten_only_on_request(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)
    first = training.save_state("same", user_metadata={"which": "first"}).result().path

    with pytest.raises(tinker.RequestFailedError, match="overwrite"):
        training.save_state("same").result()
    training.save_weights_for_sampler("same").result()
    with pytest.raises(tinker.RequestFailedError, match="delete it first"):
        training.save_weights_for_sampler("same").result()
    losses(training, 2)
    second = training.save_state("same", overwrite=True, user_metadata={"which": "2nd"}).result()

    assert second.path == first
    after = losses(training, 2)
    resumed = client.create_training_client_from_state_with_optimizer(first).result()
    assert losses(resumed, 2) == after


def test_lists_show_exactly_the_saved_checkpoints(
    server: Server, client: tinker.ServiceClient
) -> None:
    training = a_training_client(client)
    rest = server.rest()
    training.save_state("a", user_metadata={"note": "x"}).result()
    training.save_weights_for_sampler("b", ttl_seconds=3600).result()
    with pytest.raises(tinker.RequestFailedError):
        training.save_state("not/allowed").result()

    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    run = rest.get_training_run(training.model_id).result()
    raw = server.request("GET", "/api/v1/checkpoints?limit=2").json()["checkpoints"]

    assert [entry.checkpoint_id for entry in listed] == ["weights/a", "sampler_weights/b"]
    assert [entry["base_model"] for entry in raw] == [MODEL, MODEL]
    assert listed[0].user_metadata == {"note": "x"}
    assert (listed[0].size_bytes or 0) > 0
    assert listed[1].expires_at is not None
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.checkpoint_id == "weights/a"
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/b"


def test_a_deleted_checkpoint_is_gone_everywhere(
    server: Server, client: tinker.ServiceClient
) -> None:
    training = a_training_client(client)
    rest = server.rest()
    path = training.save_state("gone").result().path

    rest.delete_checkpoint_from_tinker_path(path).result()

    assert rest.list_checkpoints(training.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(path).result()
    assert (
        list((server.state_dir / "checkpoints" / "runs").glob(f"{training.model_id}/*/gone/*"))
        == []
    )


def test_weights_info_describes_a_checkpoint(server: Server, client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(MODEL, rank=8, train_mlp=False).result()
    path = training.save_state("described").result().path

    info = server.rest().get_weights_info_by_tinker_path(path).result()

    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 8)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)


def test_runs_are_listed_by_project(server: Server) -> None:
    project = server.new_project("alpha")
    sessions = [
        server.post("create_session", {"sdk_version": "t", **fields}).json()["session_id"]
        for fields in ({"project_id": project}, {})
    ]
    runs = [
        server.post(
            "create_model",
            {
                "session_id": session,
                "model_seq_id": 0,
                "base_model": MODEL,
                "lora_config": {"rank": 1},
            },
        ).json()["model_id"]
        for session in sessions
    ]

    of_project = server.rest().list_training_runs(project_id=project).result()

    assert [run.training_run_id for run in of_project.training_runs] == runs[:1]
    assert of_project.cursor.total_count == 1


def test_metadata_of_any_json_type_is_returned_as_text(server: Server) -> None:
    values: dict[str, Any] = {
        "seed": 3,
        "lr": 0.5,
        "tags": ["a", {"b": None}],
        "is_test": True,
        "note": "x",
    }
    kept = {
        "seed": "3",
        "lr": "0.5",
        "tags": '["a", {"b": null}]',
        "is_test": "true",
        "note": "x",
    }
    body = {"sdk_version": "0.38.0", "tags": [], "user_metadata": values}
    session = server.post("create_session", body).json()["session_id"]

    client = server.client()
    training = client.create_lora_training_client(MODEL, rank=4, user_metadata=values).result()
    # The SDK itself sends only strings as metadata of a save.
    path = training.save_state("a", user_metadata=kept).result().path

    rest = server.rest()
    assert rest.get_session(session).result().user_metadata == kept
    assert rest.get_training_run(training.model_id).result().user_metadata == kept
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [(each.tinker_path, each.user_metadata) for each in listed] == [(path, kept)]


def test_deeply_nested_metadata_is_rejected(server: Server) -> None:
    for depth in (50, 980, 100_000):
        body = b'{"sdk_version": "1", "user_metadata": {"a": %s1%s}}' % (b"[" * depth, b"]" * depth)
        answer = server.post("create_session", body)
        assert answer.status == (200 if depth == 50 else 400), answer.body


def test_metadata_of_a_run_is_kept(server: Server, client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(
        MODEL, rank=4, user_metadata={"renderer_name": "role_colon"}
    ).result()

    run = server.rest().get_training_run(training.model_id).result()

    assert run.user_metadata == {"renderer_name": "role_colon"}
    assert run.base_model == MODEL
