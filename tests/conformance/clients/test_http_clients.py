"""Clients without an SDK: JSON requests with as few fields as possible."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tinker

from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.servers import API_KEY, Answer, Server
from tinkercloud_testing.small_models.models import byte_tokenizer

MODEL = "tiny/llama"
PROMPT = {"tokens": [1, 2, 3]}
LORA = {"rank": 4, "train_mlp": True, "train_attn": True}
DATUM = {
    "model_input": PROMPT,
    "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64"}},
}


def create(server: Server, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    body = {"model_name": MODEL, "lora_config": LORA, **fields}
    return server.request("POST", "/api/v1/create_model", body, headers=headers)


def created(server: Server, **fields: Any) -> str:
    """Create a model; return its id once it exists."""
    promise = create(server, **fields)
    assert promise.status == 200, promise.body
    return str(server.result(promise.json()["request_id"]).json()["model_id"])


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    """Return a model that the tests of this module share."""
    return created(server)


@pytest.fixture(scope="module")
def newcomer(server: Server) -> str:
    """Return the key of an owner who has nothing."""
    return server.new_key("newcomer-without-sdk")


@pytest.fixture(scope="module")
def stranger(server: Server) -> str:
    """Return the key of another owner."""
    return server.new_key("stranger-without-sdk")


def sample(server: Server, *, key: str = API_KEY, **fields: Any) -> Answer:
    body = {"prompt": PROMPT, "sampling_params": {"max_tokens": 3, "seed": 1}, **fields}
    return server.post("sample", body, key=key)


def sampled(server: Server, **weights: Any) -> dict[str, Any]:
    answer = sample(server, **weights)
    assert answer.status == 200, answer.body
    return answer.json()


def prompt_logprobs(server: Server, **weights: object) -> list[float | None]:
    scores = sampled(server, prompt_logprobs=True, **weights)["prompt_logprobs"]
    assert isinstance(scores, list)
    return scores


def train(server: Server, model_id: str) -> None:
    """Send a training step without waiting for it."""
    batch = {"model_id": model_id, "data": [DATUM], "loss_fn": "cross_entropy"}
    step = {"model_id": model_id, "adam_params": {"learning_rate": 0.05}}
    for path, body in (("forward_backward", batch), ("optim_step", step)):
        assert server.post(path, body).status == 200


def state(server: Server, request_id: str, method: str = "GET") -> dict[str, Any]:
    """Return the state of a request once it is not pending."""
    while True:
        answer = server.request(method, f"/api/v1/retrieve_future/{request_id}")
        assert answer.status == 200, answer.body
        if answer.json()["status"] != "pending":
            return answer.json()


def test_models_get_a_session_and_numbers(server: Server) -> None:
    first = create(server).json()
    with ThreadPoolExecutor(4) as threads:
        more = list(threads.map(lambda _: create(server, session_id=first["session_id"]), range(4)))

    ids = [first["model_id"], *(answer.json()["model_id"] for answer in more)]
    assert sorted(ids) == [f"{first['session_id']}:train:{index}" for index in range(5)]


@pytest.mark.parametrize("body", [None, {}, {"tags": ["curl"]}])
def test_a_session_needs_no_fields_and_no_body(server: Server, body: object) -> None:
    answer = server.post("create_session", body)

    assert answer.status == 200, answer.body
    assert server.request("GET", f"/api/v1/sessions/{answer.json()['session_id']}").status == 200


def test_an_accepted_request_says_so_in_words(server: Server, model: str) -> None:
    accepted = [
        create(server),
        server.post("optim_step", {"model_id": model, "adam_params": {}}),
        server.post("asample", {"prompt": PROMPT, "base_model": MODEL}),
        server.post("unload_model", {"model_id": created(server)}),
    ]

    for answer in accepted:
        assert "retrieve_future" in answer.json()["message"]


@pytest.mark.parametrize("numbered", [False, True])
def test_weights_for_sampling_may_be_saved_without_a_name(
    server: Server, *, numbered: bool
) -> None:
    model_id = created(server)
    fields = {"seq_id": 1} if numbered else {}
    promise = server.post("save_weights_for_sampler", {"model_id": model_id, **fields}).json()

    saved = server.result(promise["request_id"]).json()["path"]

    listed = server.request("GET", f"/api/v1/training_runs/{model_id}/checkpoints").json()
    assert saved == f"tinker://{model_id}/sampler_weights/step-000001"
    assert [each["tinker_path"] for each in listed["checkpoints"]] == [saved]
    assert len(sampled(server, model_path=saved)["sequences"]) == 1


def test_what_a_whole_model_lacks_is_null_and_not_absent(server: Server) -> None:
    model_id = created(server, lora_config={"rank": 0})
    promise = server.post("save_weights", {"model_id": model_id}).json()
    path = server.result(promise["request_id"]).json()["path"]
    session = {"session_id": model_id.partition(":")[0]}

    run = server.request("GET", f"/api/v1/training_runs/{model_id}").json()
    found = server.post("sessions/search", session).json()["sessions"]

    assert server.post("get_info", {"model_id": model_id}).json()["lora_rank"] is None
    assert server.post("weights_info", {"tinker_path": path}).json()["lora_rank"] is None
    assert run["lora_rank"] is None
    assert [each["display_name"] for each in found] == [None]


@pytest.mark.parametrize("has_session", [False, True])
def test_a_repeated_create_model_creates_one_model(server: Server, *, has_session: bool) -> None:
    session = server.post("create_session", {"sdk_version": "none"}).json()["session_id"]
    fields = {"session_id": session} if has_session else {}
    key = {"X-Idempotency-Key": f"one-of-{session}"}

    answers = [create(server, headers=key, **fields).json() for _ in range(2)]
    other = create(server, headers={"X-Idempotency-Key": f"two-of-{session}"}, **fields).json()
    changed = create(server, headers=key, **fields, lora_config={"rank": 2})

    assert answers[0] == answers[1]
    assert other["model_id"] != answers[0]["model_id"]
    assert changed.status == 400
    assert "was already used" in changed.detail


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_seq_len": 1 << 30}, "max_seq_len: got 1073741824, but 'tiny/llama' accepts at most"),
        ({"max_batch_size": 1 << 30}, "max_batch_size: got 1073741824, but 'tiny/llama' accepts"),
        ({"max_batch_size": 0}, "max_batch_size: "),
        (
            {"lora_config": {"rank": 512}},
            "lora_config.rank: got rank 512, but 'tiny/llama' accepts at most 256",
        ),
        (
            {"lora_config": {"rank": 10**9}},
            "but 'tiny/llama' accepts at most 256; use a lower rank, or raise limits.max_lora",
        ),
        ({"model_name": "another/model"}, "is not served here"),
        ({"model_name": None}, "model_name: "),
        ({"model_seq_id": "0"}, "model_seq_id: "),
    ],
)
def test_an_impossible_model_is_rejected_and_leaves_no_session(
    server: Server, newcomer: str, fields: dict[str, object], reason: str
) -> None:
    body = {"model_name": MODEL, "lora_config": LORA, **fields}

    answer = server.post("create_model", body, key=newcomer)

    assert answer.status == 400
    assert reason in answer.detail
    sessions = server.request("GET", "/api/v1/sessions", key=newcomer).json()
    assert sessions == {"sessions": []}


def test_a_sample_of_a_model_uses_the_weights_after_all_earlier_requests(server: Server) -> None:
    model_id = created(server, max_seq_len=64, max_batch_size=4)
    before = prompt_logprobs(server, model_id=model_id)

    train(server, model_id)
    after = prompt_logprobs(server, model_id=model_id)

    promise = server.post("save_weights_for_sampler", {"model_id": model_id, "path": "now"})
    path = state(server, promise.json()["request_id"])["result"]["path"]
    assert before == prompt_logprobs(server, base_model=MODEL)
    assert before != after
    assert after == prompt_logprobs(server, model_path=path)
    assert after == prompt_logprobs(server, model_path=path, base_model=MODEL)


def test_models_that_the_sdk_trains_can_be_sampled_without_it(
    server: Server, client: tinker.ServiceClient
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()

    for _ in range(2):
        assert sampled(server, model_id=training.model_id)["sequences"]
        training.optim_step(tinker.AdamParams()).result()


def test_repeated_samples_of_the_same_weights_share_a_sampling_session(
    server: Server, model: str
) -> None:
    weights = [{"base_model": MODEL}, {"model_id": model}]

    clients = [server.post("create_sampling_client", each).json() for each in weights * 2]
    for client in clients:
        assert sampled(server, sampling_session_id=client["sampling_client_id"])["sequences"]
        assert server.request("GET", f"/api/v1/samplers/{client['sampling_client_id']}").json() == {
            "sampler_id": client["sampling_session_id"],
            "base_model": MODEL,
            "model_path": None,
        }

    assert clients[:2] == clients[2:]


@pytest.mark.parametrize(
    "prompt", [[1, 2, 3], {"tokens": [1, 2, 3]}, {"input_ids": [1, 2, 3]}, {"chunks": [PROMPT]}]
)
def test_prompts_have_several_forms(server: Server, prompt: object) -> None:
    expected = sampled(server, base_model=MODEL)

    assert sampled(server, base_model=MODEL, prompt=prompt) == expected


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({}, 400, "set one of sampling_session_id, model_id"),
        ({"model_id": None}, 400, "set one of sampling_session_id, model_id"),
        ({"model_id": "s:train:0"}, 404, "training run 's:train:0' does not exist"),
        ({"model_id": "nothing"}, 400, "is malformed"),
        ({"base_model": "another/model"}, 400, "is not served here"),
        ({"model_path": "tinker://s:train:0/weights/x"}, 404, "x"),
        ({"model_path": "/data/checkpoints/x"}, 400, "/data/checkpoints/x"),
        ({"model_id": "s:train:0", "base_model": MODEL}, 400, "set one of"),
        ({"sampling_session_id": "s:sample:0"}, 404, "does not exist"),
        ({"sampling_session_id": f"s:sample:{1 << 62}"}, 404, "does not exist"),
        ({"base_model": MODEL, "prompt": {"tokens": [1 << 40]}}, 400, "1099511627776"),
        ({"base_model": MODEL, "prompt": {}}, 400, "set one of chunks, tokens and input_ids"),
        ({"base_model": MODEL, "prompt": None}, 400, "prompt"),
        ({"base_model": MODEL, "num_samples": 0}, 400, "num_samples"),
        ({"base_model": MODEL, "note": {"model_id": "s:train:0"}}, 400, "set one of"),
        ({"note": {"base_model": MODEL}}, 400, "set one of"),
    ],
)
def test_a_wrong_sample_is_rejected_with_the_reason(
    server: Server, fields: dict[str, object], status: int, reason: str
) -> None:
    for path in ("sample", "asample"):
        answer = server.post(path, {"prompt": PROMPT, **fields})
        assert (answer.status, reason in answer.detail) == (status, True), answer.body


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 400),
        ({"base_model": "another/model"}, 400),
        ({"base_model": MODEL, "model_id": "s:train:0"}, 400),
        ({"base_model": MODEL, "sampling_session_seq_id": 0}, 400),
        ({"base_model": MODEL, "session_id": "s"}, 404),
        ({"model_id": "s:train:0"}, 404),
        ({"model_path": "tinker://s:train:0/weights/x"}, 404),
        ({"model_path": 3}, 400),
    ],
)
def test_a_wrong_sampling_client_is_rejected(
    server: Server, fields: dict[str, object], status: int
) -> None:
    answer = server.post("create_sampling_client", fields)

    assert (answer.status, bool(answer.detail)) == (status, True)


def test_a_sampling_client_may_belong_to_a_session(server: Server) -> None:
    session = server.post("create_session", {"sdk_version": "none"}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 3, "base_model": MODEL}

    numbered, unnumbered = (
        server.post("create_sampling_client", each).json()["sampling_client_id"]
        for each in (body, {"session_id": session, "base_model": MODEL})
    )

    samplers = server.request("GET", f"/api/v1/sessions/{session}").json()["sampler_ids"]
    assert samplers == [numbered, unnumbered]
    assert numbered == f"{session}:sample:3"


def test_a_sample_that_fails_has_the_status_of_its_failure(server: Server) -> None:
    params = {"max_tokens": 3, "stop": []}
    saved = created(server)
    server.post("delete_model", {"model_id": saved})

    answer = sample(server, model_id=saved, sampling_params=params)

    assert answer.status == 400
    assert "was deleted" in answer.detail


def test_objects_of_another_owner_do_not_exist(server: Server, stranger: str, model: str) -> None:
    promise = server.post("asample", {"prompt": PROMPT, "model_id": model})
    request_id = promise.json()["request_id"]
    session = model.partition(":")[0]

    def status(method: str, path: str, body: object = None) -> int:
        return server.request(method, f"/api/v1/{path}", body, key=stranger).status

    statuses = {
        "sample": status("POST", "sample", {"prompt": PROMPT, "model_id": model}),
        "asample": status("POST", "asample", {"prompt": PROMPT, "model_id": model}),
        "client": status("POST", "create_sampling_client", {"model_id": model}),
        "sampler": status("GET", f"samplers/{request_id.rpartition(':')[0]}"),
        "tokenizer": status("GET", f"get_tokenizer?model_id={model}"),
        "state": status("GET", f"retrieve_future/{request_id}"),
        "state of model": status("POST", f"retrieve_future/{model}:0"),
        "delete": status("POST", "delete_model", {"model_id": model}),
        "create": status("POST", "create_model", {"model_name": MODEL, "session_id": session}),
    }

    assert statuses == dict.fromkeys(statuses, 404)
    assert state(server, request_id)["status"] == "completed"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_state_of_a_request_is_returned_at_once(
    server: Server, model: str, method: str
) -> None:
    good = server.post("asample", {"prompt": PROMPT, "model_id": model, "num_samples": 2})
    bad = server.post("load_weights", {"model_id": model, "path": "nowhere", "optimizer": False})
    step = server.post("optim_step", {"model_id": model, "adam_params": {"learning_rate": -1}})

    completed = state(server, good.json()["request_id"], method)
    assert (completed["status"], completed["error"]) == ("completed", None)
    assert len(completed["result"]["sequences"]) == 2
    assert bad.status == step.status == 400
    gone = server.request(method, f"/api/v1/retrieve_future/{model}:999")
    assert gone.status == 404
    malformed = server.request(method, "/api/v1/retrieve_future/nothing")
    assert malformed.status == 404
    assert "request_id 'nothing' is malformed: expected" in malformed.detail


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("retrieve_future", {"request_id": "nope"}),
        ("cancel_future", {"request_id": "nope"}),
        ("join_sampling_session", {"sampling_session_id": "nope"}),
        ("asample", {"sampling_session_id": "nope", "prompt": PROMPT}),
        ("get_info", {"model_id": "nope"}),
    ],
)
def test_an_id_that_is_none_of_ours_does_not_exist(
    server: Server, path: str, body: dict[str, object]
) -> None:
    assert server.post(path, body).status == 404


def test_the_state_of_a_failed_request_names_the_reason(server: Server) -> None:
    model_id = created(server)
    # It has a number, so that it fails in its place.
    body = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": -1}}
    promise = server.post("optim_step", body)

    failed = state(server, promise.json()["request_id"])

    assert (failed["status"], failed["result"], failed["category"]) == ("failed", None, "user")
    assert "learning_rate" in failed["error"]


def test_only_delivered_results_of_the_caller_are_forgotten(server: Server, stranger: str) -> None:
    def asked() -> str:
        promise = server.post("asample", {"prompt": PROMPT, "base_model": MODEL}, key=stranger)
        return str(promise.json()["request_id"])

    read, unread = asked(), asked()
    assert server.result(read, key=stranger).status == 200

    assert server.post("cleanup_futures", {}).status == 200
    assert server.post("cleanup_futures", {"max_age_hours": 1}, key=stranger).json() == {
        "cleaned_count": 0
    }
    assert server.result(read, key=stranger).status == 200
    assert server.post("cleanup_futures", None, key=stranger).json() == {"cleaned_count": 1}
    assert server.result(read, key=stranger).status == 410
    assert server.result(unread, key=stranger).status == 200
    assert server.post("cleanup_futures", {"max_age_hours": -1}, key=stranger).status == 400


def test_health_and_capabilities(server: Server, model: str, stranger: str) -> None:
    mine = server.request("GET", "/api/v1/health").json()
    theirs = server.request("GET", "/api/v1/health", key=stranger).json()
    capabilities = server.request("GET", "/api/v1/get_server_capabilities").json()

    assert server.request("GET", "/health", key=None).json() == {"status": "healthy"}
    assert server.request("GET", "/api/v1/health", key=None).status == 401
    assert (mine["status"], mine["ray_status"]) == ("healthy", "not used")
    assert mine["active_models"] >= 1
    assert mine["active_sessions"] >= 1
    assert theirs["active_models"] == 0
    assert capabilities["supported_models"][0]["model_name"] == MODEL
    assert capabilities["max_batch_size"] >= 1024
    assert {"lora", "sampling"} <= set(capabilities["features"])
    assert model


def test_the_tokenizer_of_a_model_is_served(server: Server, model: str) -> None:
    answer = server.request("GET", f"/api/v1/get_tokenizer?model_id={model}")

    assert answer.status == 200
    assert answer.json() == json.loads(byte_tokenizer().backend_tokenizer.to_str())
    for query, status in (("", 400), ("?model_id=s:train:0", 404), ("?model_id=", 400)):
        refused = server.request("GET", f"/api/v1/get_tokenizer{query}")
        assert (refused.status, bool(refused.detail)) == (status, True)


def test_a_tokenizer_that_the_client_has_is_not_sent_again(server: Server, model: str) -> None:
    path = f"/api/v1/get_tokenizer?model_id={model}"
    tag = server.request("GET", path).headers["etag"]

    again = server.request("GET", path, headers={"If-None-Match": f'"other", {tag}'})
    changed = server.request("GET", path, headers={"If-None-Match": '"other"'})

    assert (again.status, again.body) == (304, b"")
    assert changed.status == 200


def test_a_key_may_be_a_bearer_token(server: Server) -> None:
    def status(**headers: str) -> int:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        path = "/api/v1/get_server_capabilities"
        return server.request("GET", path, key=None, headers=fields).status

    assert status(Authorization=f"Bearer {API_KEY}") == 200
    assert status(Authorization=f"bearer {API_KEY}", X_API_Key=API_KEY) == 200
    assert status(Authorization="Basic dXNlcjpwYXNz", X_API_Key=API_KEY) == 200
    assert status(Authorization=f"Bearer {API_KEY}", X_API_Key="tml-another-key") == 400
    assert status(Authorization="Bearer tml-another-key") == 401
    assert status(Authorization="Basic dXNlcjpwYXNz") == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *[("GET", "/api/v1/nothing"), ("GET", "/nothing")],
        *[("POST", "/api/v1/create_session/"), ("GET", "/api/v1/sessions/")],
    ],
)
def test_unknown_calls_are_not_found_with_a_reason(server: Server, method: str, path: str) -> None:
    answer = server.request(method, path)

    assert answer.status == 404
    assert f"{method} {path} is not supported" in answer.detail


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *[("GET", f"/api/v1/{call}", "POST") for call in ("create_model", "sample", "asample")],
        *[("PUT", "/api/v1/optim_step", "POST"), ("OPTIONS", "/api/v1/create_model", "POST")],
        *[("DELETE", "/api/v1/health", "GET"), ("PATCH", "/api/v1/retrieve_future/x", "GET")],
    ],
)
def test_a_call_with_another_method_names_the_right_one(
    server: Server, method: str, path: str, allowed: str
) -> None:
    answer = server.request(method, path)

    assert answer.status == 405
    assert allowed in answer.headers["allow"]


def test_a_json_body_needs_no_content_type(server: Server) -> None:
    """`curl -d` declares every body as a form."""
    request = urllib.request.Request(
        f"{server.url}/api/v1/create_session",
        data=b'{"sdk_version": "none"}',
        headers={
            "X-API-Key": API_KEY,
            "Content-Type": "application/x-www-form-urlencoded",
        },
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        assert json.loads(response.read())["session_id"]


def test_deleting_a_model_can_be_repeated_and_keeps_its_checkpoints(server: Server) -> None:
    model_id = created(server)
    save = server.post("save_weights", {"model_id": model_id, "path": "kept"})
    path = state(server, save.json()["request_id"])["result"]["path"]

    for call in ("delete_model", "unload_model", "delete_model"):
        promise = server.post(call, {"model_id": model_id})
        assert promise.status == 200
        assert state(server, promise.json()["request_id"])["status"] == "completed"

    assert server.post("weights_info", {"tinker_path": path}).json()["base_model"] == MODEL
