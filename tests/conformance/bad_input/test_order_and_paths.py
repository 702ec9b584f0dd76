"""Invalid steps, saves, loads and creations fail with a reason."""

from urllib.parse import quote

import pytest

from tinkercloud_testing.clients.raw_run import MODEL, Run

BAD_ORDERED_REQUESTS: dict[str, tuple[str, dict[str, object], str]] = {
    "negative rate": ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "learning_rate"),
    "rate of text": ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
    "beta of one": ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1"),
    "epsilon of zero": ("optim_step", {"adam_params": {"eps": 0.0}}, "adam_params.eps"),
    "no parameters": ("optim_step", {}, "send adam_params"),
    "dimuon": ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "'dimuon' is not supported"),
    "a name with a slash": ("save_weights", {"path": "a/b"}, "not allowed"),
    "a name that climbs": ("save_weights", {"path": ".."}, "not allowed"),
    "an empty name": ("save_weights", {"path": ""}, "path"),
    "a short life": ("save_weights", {"path": "x", "ttl_seconds": 5}, "ttl_seconds"),
    "metadata of long values": (
        "save_weights",
        {"path": "x", "user_metadata": {"a": [1] * 4096}},
        "user_metadata.a",
    ),
    "metadata of megabytes": (
        "save_weights",
        {"path": "x", "user_metadata": {"a": "x" * (2 << 20)}},
        "user_metadata.a",
    ),
    "an export without a name": ("save_weights_external", {}, "path: Field required"),
    "an export for nobody": (
        "save_weights_external",
        {"path": "x", "age_encryption_recipients": []},
        "age_encryption_recipients: List should have at least 1 item",
    ),
    "an export for too many": (
        "save_weights_external",
        {"path": "x", "age_encryption_recipients": ["age1x"] * 11},
        "age_encryption_recipients: List should have at most 10 items",
    ),
    "an export for no key": (
        "save_weights_external",
        {"path": "x", "age_encryption_recipients": ["age1x"]},
        "age_encryption_recipients.0: is not a public key of age",
    ),
    "a load of an export": (
        "load_weights",
        {"path": "tinker://nobody:train:0/external_weights/x", "optimizer": False},
        "holds files for download and can't be loaded",
    ),
    "a load from elsewhere": (
        "load_weights",
        {"path": "http://é.example", "optimizer": False},
        "path 'http://é.example' is not a checkpoint",
    ),
    "a load of megabytes": (
        "load_weights",
        {"path": "x", "optimizer": False, "user_metadata": {"é" * (1 << 20): 1}},
        "user_metadata.éééé",
    ),
    "a load of what does not exist": (
        "load_weights",
        {"path": "tinker://nobody:train:0/weights/x", "optimizer": True},
        "does not exist, or belongs to another owner",
    ),
    "a load of nothing": ("load_weights", {"optimizer": False}, "path: Field required"),
    "two targets": (
        "save_weights_for_sampler",
        {"path": "x", "sampling_session_seq_id": 1},
        "or neither (a checkpoint named by the number of the request), not both",
    ),
}


@pytest.mark.parametrize("name", BAD_ORDERED_REQUESTS)
def test_an_invalid_request_in_sequence_fails_with_a_reason(run: Run, name: str) -> None:
    path, fields, reason = BAD_ORDERED_REQUESTS[name]

    outcome = run.outcome(run.send(path, **fields))

    assert reason in str(outcome["error"])
    assert outcome["category"] == "user"


def test_a_request_over_the_limit_fails_in_sequence(run: Run) -> None:
    metadata = {"a": "x" * (70 << 20)}

    outcome = run.outcome(run.send("save_weights", path="x", user_metadata=metadata))

    reason = f"request body: larger than {64 << 20} bytes; send less data per request"
    assert outcome == {"error": reason, "category": "user"}


BAD_CREATIONS: dict[str, tuple[dict[str, object], int, str]] = {
    "unknown model": ({"base_model": "gpt-17"}, 400, "served base models: 'tiny/llama'"),
    "negative rank": ({"lora_config": {"rank": -1}}, 400, "lora_config.rank"),
    "nothing to train": (
        {
            "lora_config": {
                "rank": 4,
                "train_mlp": False,
                "train_attn": False,
                "train_unembed": False,
            }
        },
        400,
        "at least one of",
    ),
    "unknown session": ({"session_id": "nobody"}, 404, "session 'nobody' does not exist"),
    "index of text": ({"model_seq_id": "one"}, 400, "model_seq_id"),
    "no model": ({"base_model": None}, 400, "base_model"),
    "rank": ({"lora_config": {"rank": 1000}}, 400, "lora_config.rank: got rank 1000"),
}


@pytest.mark.parametrize("name", BAD_CREATIONS)
def test_an_invalid_creation_is_rejected_immediately(run: Run, name: str) -> None:
    changes, status, reason = BAD_CREATIONS[name]

    answer = run.server.post("create_model", run.create(5, **changes))

    assert answer.status == status
    assert reason in answer.detail


def test_a_creation_that_only_the_engine_can_validate_fails_with_a_reason(run: Run) -> None:
    request = run.create(11, optimizer_config={"type": "dimuon", "version": 1})

    outcome = run.outcome(run.server.post("create_model", request))

    assert "dimuon" in str(outcome["error"])


def test_a_reused_model_index_for_another_model_is_rejected(run: Run) -> None:
    same = run.server.post("create_model", run.create(0))
    other = run.server.post("create_model", run.create(0, lora_config={"rank": 8}))

    assert same.status == 200
    assert other.status == 400
    assert "already used" in other.detail


def test_a_sampling_session_keeps_its_weights_when_requested_by_another_caller(run: Run) -> None:
    sampler = {"session_id": run.session, "sampling_session_seq_id": 30, "base_model": MODEL}
    of_the_base = run.server.post("create_sampling_session", sampler)
    assert of_the_base.status == 200
    mine = run.outcome(run.send("save_weights_for_sampler", sampling_session_seq_id=31))
    other = run.server.post("create_model", run.create(30))
    other_id = str(run.outcome(other)["model_id"])

    refused = [
        run.outcome(run.send("save_weights_for_sampler", sampling_session_seq_id=index))
        for index in (30, 31)
    ]
    save = {"model_id": other_id, "seq_id": 1, "sampling_session_seq_id": 31}
    refused.append(run.outcome(run.server.post("save_weights_for_sampler", save)))
    refused_create = run.server.post(
        "create_sampling_session", {**sampler, "sampling_session_seq_id": 31}
    )

    for outcome in refused:
        assert "in this session for other weights" in str(outcome["error"])
        assert outcome["category"] == "user"
    assert refused_create.status == 400
    assert mine["sampling_session_id"] == f"{run.session}:sample:31"
    assert run.server.post("create_sampling_session", sampler).json() == of_the_base.json()
    run.step()


def test_state_is_not_restored_into_another_optimizer(run: Run) -> None:
    saved = run.outcome(run.send("save_weights", path="of-adamw"))
    create = {"session_id": run.session, "path": saved["path"], "optimizer": True}
    dimuon, adamw = {"type": "dimuon", "version": 1}, {"type": "adamw"}

    refused = run.server.post(
        "load_weights", {**create, "model_seq_id": 40, "optimizer_config": dimuon}
    )
    same = run.server.post(
        "load_weights", {**create, "model_seq_id": 40, "optimizer_config": adamw}
    )

    assert refused.status == 400
    assert "optimizer_config: " in refused.detail
    assert "'adamw'" in refused.detail
    assert run.outcome(same)["path"] == saved["path"]


BAD_PATHS = [
    "tinker://x",
    "http://example.com/a/b",
    "tinker://../weights/x",
    "tinker://{run}/weights/../x",
    "tinker://{run}/weights/..%2f..",
    "tinker://{run}/secrets/x",
    "tinker://{run}/weights/x/y",
    "tinker:///weights/x",
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_malformed_path_is_rejected_everywhere(run: Run, path: str) -> None:
    uri = path.format(run=run.model_id)
    create = {"session_id": run.session, "model_seq_id": 20, "path": uri, "optimizer": False}
    sampler = {"session_id": run.session, "sampling_session_seq_id": 20, "model_path": uri}

    answers = [
        run.server.post("weights_info", {"tinker_path": uri}),
        run.server.post("load_weights", create),
        run.server.post("create_sampling_session", sampler),
    ]

    assert [answer.status for answer in answers] == [400, 400, 400]


def test_a_missing_checkpoint_is_not_found(run: Run) -> None:
    uri = f"tinker://{run.model_id}/weights/never-saved"

    assert run.server.post("weights_info", {"tinker_path": uri}).status == 404


def test_a_load_in_both_forms_or_in_neither_is_rejected(run: Run) -> None:
    path = f"tinker://{run.model_id}/weights/x"

    answer = run.server.post("load_weights", {"path": path, "optimizer": False})

    assert answer.status == 400
    assert "set either model_id (load into" in answer.detail


NOT_SERVED_IN_ORDER = {
    "a_call_of_next_year": "POST /api/v1/a_call_of_next_year is not supported by this server",
    "merge%20weights/é?a=b": "is not supported by this server",
}


@pytest.mark.parametrize("path", NOT_SERVED_IN_ORDER)
def test_an_unsupported_call_leaves_no_gap_in_the_sequence(run: Run, path: str) -> None:
    # Like the SDK, which writes the data first, however large.
    body = {
        "forward_backward_input": {"data": [list(range(50_000))], "loss_fn": "cross_entropy"},
        "model_id": run.model_id,
        "seq_id": run.take_seq_id(),
    }

    outcome = run.outcome(run.server.post(quote(path, safe="/?=%"), body))

    assert NOT_SERVED_IN_ORDER[path] in str(outcome["error"])
    assert outcome["category"] == "user"
    applied = run.outcome(run.send("optim_step", adam_params={"learning_rate": 0.01}))
    assert "not applied" in str(applied["error"])


@pytest.mark.parametrize("path", ["forward", "forward_backward"])
def test_an_invalid_batch_in_json_fails_in_its_place(run: Run, path: str) -> None:
    # Like old SDKs, which write the data first, however large.
    body = {
        "forward_backward_input": {"data": [list(range(50_000))], "loss_fn": "cross_entropy"},
        "model_id": run.model_id,
        "seq_id": run.take_seq_id(),
    }

    outcome = run.outcome(run.server.post(path, body))

    assert "data[0]: must be an object, got [0, 1, 2" in str(outcome["error"])
    assert outcome["category"] == "user"
    applied = run.outcome(run.send("optim_step", adam_params={"learning_rate": 0.01}))
    may_belong_to_the_step = path != "forward"
    assert ("not applied" in str(applied.get("error"))) == may_belong_to_the_step


def test_an_unsupported_call_without_a_sequence_number_is_rejected_immediately(run: Run) -> None:
    for body in ({}, {"model_id": run.model_id}, {"seq_id": 1}, {"model_id": 1, "seq_id": 1}):
        assert run.server.post("a_call_of_next_year", body).status == 404
    assert run.server.post("forward_backward", {"model_id": run.model_id}).status == 400


def test_nobody_can_use_sequence_numbers_of_another_owners_model(run: Run) -> None:
    body = {"model_id": run.model_id, "seq_id": run.next_seq_id}

    answer = run.server.post("forward", body, key=run.server.new_key("another"))

    assert answer.status == 404
    assert "does not exist" in answer.detail
