"""Every kind of wrong request has a documented answer, and the session still trains afterwards.

Requests that name a place in a model's order (they carry a seq_id) take that place: what is wrong
with their content is told by their future, as category `user`. Everything else is refused at once
with a 4xx whose `detail` says what to change.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_testing.servers import Answer, Server

MODEL = "tiny/llama"
VOCAB_SIZE, CONTEXT = 264, 512


class Run:
    """A raw training run, for requests the SDK would never send."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.session = str(server.post("create_session", {"sdk_version": "t"}).json()["session_id"])
        created = server.post("create_model", self.create(0)).json()
        self.model_id = str(server.result(str(created["request_id"])).json()["model_id"])
        self.next_seq_id = 1

    def create(self, index: int, **changes: object) -> dict[str, object]:
        request = {
            "session_id": self.session,
            "model_seq_id": index,
            "base_model": MODEL,
            "lora_config": {"rank": 4},
        }
        return {**request, **changes}

    def take_seq_id(self) -> int:
        self.next_seq_id += 1
        return self.next_seq_id - 1

    def send(self, path: str, /, **fields: object) -> Answer:
        body = {"model_id": self.model_id, "seq_id": self.take_seq_id(), **fields}
        return self.server.post(path, body)

    def train(self, body: bytes, **headers: str) -> Answer:
        fields = {"Content-Type": "application/x-protobuf", **headers}
        return self.server.request("POST", "/api/v1/forward_backward", body, headers=fields)

    def outcome(self, answer: Answer) -> dict[str, object]:
        """Return what the future of an accepted request says."""
        assert answer.status == 200, answer.body
        return self.server.result(str(answer.json()["request_id"])).json()

    def step(self) -> float:
        """Train one sound step and return its loss."""
        answer = self.train(self.batch().SerializeToString())
        request_id = str(answer.json()["request_id"])
        output = pb.ForwardBackwardOutput.FromString(self.server.result(request_id).body)
        applied = self.outcome(self.send("optim_step", adam_params={"learning_rate": 0.01}))
        assert "error" not in applied
        return output.metrics["loss:sum"]

    def batch(
        self,
        tokens: list[int] | None = None,
        *,
        loss_fn: str = "cross_entropy",
        config: dict[str, float | str] | None = None,
        **inputs: np.ndarray,
    ) -> pb.ForwardBackwardRequest:
        ids = tokens if tokens is not None else [1, 2, 3]
        message = pb.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=self.take_seq_id(), loss_fn=loss_fn
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(ids, "<i4").tobytes()
        defaults = {"target_tokens": np.asarray(ids, "<i8")}
        for name, array in {**defaults, **inputs}.items():
            datum.loss_fn_inputs[name].CopyFrom(a_tensor(array))
        for key, value in (config or {}).items():
            if isinstance(value, str):
                message.loss_fn_config_v2[key].text = value
            else:
                message.loss_fn_config_v2[key].number = value
        return message


def a_tensor(array: np.ndarray) -> pb.Tensor:
    dtype = pb.DTYPE_FLOAT32 if array.dtype == np.float32 else pb.DTYPE_INT64
    return pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)


def floats(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


@pytest.fixture(scope="module")
def run(server: Server) -> Run:
    return Run(server)


@pytest.fixture(autouse=True)
def the_session_still_trains(run: Run) -> Iterator[None]:
    yield
    assert np.isfinite(run.step())
    assert run.server.head_pids(), "the head died"


BAD_BATCHES = {
    "unknown loss": ({"loss_fn": "rmsprop"}, "loss_fn 'rmsprop' is not available"),
    "undefined loss": ({"loss_fn": "stable_reinforce"}, "no public definition"),
    "custom loss": ({"loss_fn": "custom"}, "custom losses on the client"),
    "unknown setting": ({"config": {"beta": 1.0}}, "not a setting of 'cross_entropy'"),
    "setting of text": (
        {"loss_fn": "ppo", "config": {"clip_low_threshold": "low"}},
        "must be a finite number",
    ),
    "missing setting": (
        {"loss_fn": "dro", "logprobs": floats(1, 1, 1), "advantages": floats(1, 1, 1)},
        "loss_fn_config['beta'] is required",
    ),
    "missing input": ({"loss_fn": "importance_sampling"}, "'logprobs'] is required"),
    "unused input": ({"advantages": floats(1, 1, 1)}, "is not used by loss_fn 'cross_entropy'"),
    "lengths that disagree": ({"weights": floats(1, 1)}, "they must be equal"),
    "targets that disagree": ({"target_tokens": np.asarray([1, 2], "<i8")}, "must be equal"),
    "targets of floats": ({"target_tokens": floats(1, 2, 3)}, "must be int64"),
    "NaN weights": ({"weights": floats(1, np.nan, 1)}, "holds a NaN or an infinity"),
    "infinite weights": ({"weights": floats(1, np.inf, 1)}, "holds a NaN or an infinity"),
    "no tokens": ({"tokens": []}, "has 0 tokens"),
    "too many tokens": ({"tokens": [1] * (CONTEXT + 1)}, f"takes 1 to {CONTEXT}"),
    "a token outside the vocabulary": ({"tokens": [1, VOCAB_SIZE]}, f"0..{VOCAB_SIZE - 1}"),
    "a negative token": ({"tokens": [1, -1]}, "token id -1"),
    "two-dimensional policy targets": (
        {
            "loss_fn": "ppo",
            "target_tokens": np.ones((3, 2), "<i8"),
            "logprobs": np.ones((3, 2), np.float32),
            "advantages": np.ones((3, 2), np.float32),
        },
        "takes [N]",
    ),
    "a threshold given twice": (
        {
            "loss_fn": "ppo",
            "config": {"clip_low_threshold": 0.5},
            "clip_low_threshold": floats(1, 1, 1),
            "logprobs": floats(1, 1, 1),
            "advantages": floats(1, 1, 1),
        },
        "given twice",
    ),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_fails_with_a_reason_and_spoils_nothing(run: Run, name: str) -> None:
    arguments, reason = BAD_BATCHES[name]

    outcome = run.outcome(run.train(run.batch(**arguments).SerializeToString()))

    assert reason in str(outcome["error"])
    assert outcome["category"] == "user"


def broken_tensor(run: Run, **fields: object) -> bytes:
    message = run.batch()
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.CopyFrom(pb.Tensor(dtype=pb.DTYPE_FLOAT32, **fields))
    return message.SerializeToString()


def a_csr(rows: list[int], columns: list[int], values: int, shape: list[int]) -> dict[str, object]:
    csr = pb.SparseCsr(
        values=np.ones(values, np.float32).tobytes(),
        crow_indices=np.asarray(rows, "<i8").tobytes(),
        col_indices=np.asarray(columns, "<i8").tobytes(),
    )
    return {"sparse_csr": csr, "shape": shape}


BROKEN_TENSORS = {
    "half a value": ({"dense": b"\0\0\0"}, "not a whole number"),
    "another shape": ({"dense": bytes(12), "shape": [4]}, "needs 4 values, got 3"),
    "a negative size": ({"dense": bytes(12), "shape": [-3]}, "sizes >= 0"),
    "three dimensions": ({"dense": bytes(12), "shape": [1, 3, 1]}, "one or two sizes"),
    "a huge claim": (a_csr([0], [], 0, [1 << 40, 1 << 20]), "more than"),
    "a row too few": (a_csr([0, 0], [], 0, [3, 2]), "CSR indices do not describe"),
    "a column outside": (a_csr([0, 1, 1, 1], [5], 1, [3, 2]), "CSR indices do not describe"),
    "falling rows": (a_csr([0, 2, 1, 1], [0], 1, [3, 2]), "CSR indices do not describe"),
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_a_broken_tensor_fails_with_a_reason(run: Run, name: str) -> None:
    fields, reason = BROKEN_TENSORS[name]

    outcome = run.outcome(run.train(broken_tensor(run, **fields)))

    assert reason in str(outcome["error"])


def test_images_are_refused_by_name(run: Run) -> None:
    message = run.batch()
    message.data[0].model_input.add().image.data = b"png"

    outcome = run.outcome(run.train(message.SerializeToString()))

    assert "chunk type 'image' is not served" in str(outcome["error"])


def test_bytes_that_are_no_batch_are_refused_at_once(run: Run) -> None:
    bodies = [b"", b"\xff" * 100, b'{"model_id": "x"}', b"\x0a\xff\xff\xff\xff\x7f"]

    for body in bodies:
        answer = run.train(body)

        assert answer.status == 400
        assert "protobuf" in answer.detail
        assert int(answer.headers["content-length"]) == len(answer.body)


def test_a_batch_cut_short_fails_with_a_reason(run: Run) -> None:
    outcome = run.outcome(run.train(run.batch().SerializeToString()[:-5]))

    assert "not valid protobuf" in str(outcome["error"])


def test_a_place_that_is_none_is_refused(run: Run) -> None:
    message = run.batch()
    run.next_seq_id -= 1
    message.seq_id = 0

    answer = run.train(message.SerializeToString())

    assert answer.status == 400
    assert "seq_id: must be 1 or more" in answer.detail


def test_a_number_used_again_with_other_content_is_refused(run: Run) -> None:
    message = run.batch()
    first = run.train(message.SerializeToString())
    same = run.train(message.SerializeToString())
    message.data[0].loss_fn_inputs["weights"].CopyFrom(a_tensor(floats(2, 2, 2)))
    other = run.train(message.SerializeToString())

    assert first.json() == same.json()
    assert other.status == 400
    assert "used before by a request with other content" in other.detail


def test_a_body_over_the_limit_is_refused_and_leaves_no_gap(run: Run) -> None:
    message = run.batch(loss_fn="x" * (70 << 20))

    answer = run.train(message.SerializeToString())

    assert answer.status == 413
    assert "larger than" in answer.detail


def test_a_small_body_that_expands_over_the_limit_is_refused(run: Run) -> None:
    message = run.batch(loss_fn="x" * (70 << 20))
    compressed = zstandard.compress(message.SerializeToString())
    assert len(compressed) < 1 << 20

    answer = run.train(compressed, **{"Content-Encoding": "zstd"})

    assert answer.status == 413


def test_a_compressed_batch_is_read(run: Run) -> None:
    compressed = zstandard.compress(run.batch().SerializeToString())

    answer = run.train(compressed, **{"Content-Encoding": "zstd"})

    output = run.server.result(str(answer.json()["request_id"])).body
    assert "loss:sum" in pb.ForwardBackwardOutput.FromString(output).metrics


BAD_ORDERED_REQUESTS = {
    "negative rate": ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "learning_rate"),
    "rate of text": ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
    "beta of one": ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1"),
    "no parameters": ("optim_step", {}, "send adam_params"),
    "dimuon": ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "'dimuon' is not available"),
    "a name with a slash": ("save_weights", {"path": "a/b"}, "not allowed"),
    "a name that climbs": ("save_weights", {"path": ".."}, "not allowed"),
    "an empty name": ("save_weights", {"path": ""}, "path"),
    "a short life": ("save_weights", {"path": "x", "ttl_seconds": 5}, "ttl_seconds"),
    "metadata of numbers": ("save_weights", {"path": "x", "user_metadata": {"a": 1}}, "user_meta"),
    "no target": ("save_weights_for_sampler", {}, "give either path"),
    "two targets": (
        "save_weights_for_sampler",
        {"path": "x", "sampling_session_seq_id": 1},
        "give either path",
    ),
}


@pytest.mark.parametrize("name", BAD_ORDERED_REQUESTS)
def test_a_bad_request_in_order_fails_with_a_reason(run: Run, name: str) -> None:
    path, fields, reason = BAD_ORDERED_REQUESTS[name]

    outcome = run.outcome(run.send(path, **fields))

    assert reason in str(outcome["error"])
    assert outcome["category"] == "user"


BAD_CREATIONS = {
    "unknown model": ({"base_model": "gpt-17"}, 400, "served are: 'tiny/llama'"),
    "rank of zero": ({"lora_config": {"rank": 0}}, 400, "lora_config.rank"),
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
}


@pytest.mark.parametrize("name", BAD_CREATIONS)
def test_a_bad_creation_is_refused_at_once(run: Run, name: str) -> None:
    changes, status, reason = BAD_CREATIONS[name]

    answer = run.server.post("create_model", run.create(5, **changes))

    assert answer.status == status
    assert reason in answer.detail


def test_creations_that_only_the_engine_can_judge_fail_with_a_reason(run: Run) -> None:
    requests = {
        "rank": run.create(10, lora_config={"rank": 1000}),
        "dimuon": run.create(11, optimizer_config={"type": "dimuon", "version": 1}),
    }

    for reason, request in requests.items():
        outcome = run.outcome(run.server.post("create_model", request))

        assert reason in str(outcome["error"])


def test_a_model_index_used_again_for_another_model_is_refused(run: Run) -> None:
    same = run.server.post("create_model", run.create(0))
    other = run.server.post("create_model", run.create(0, lora_config={"rank": 8}))

    assert same.status == 200
    assert other.status == 400
    assert "used before" in other.detail


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
def test_a_path_outside_the_grammar_is_refused_everywhere(run: Run, path: str) -> None:
    uri = path.format(run=run.model_id)
    create = {"session_id": run.session, "model_seq_id": 20, "path": uri, "optimizer": False}
    sampler = {"session_id": run.session, "sampling_session_seq_id": 20, "model_path": uri}

    answers = [
        run.server.post("weights_info", {"tinker_path": uri}),
        run.server.post("load_weights", create),
        run.server.post("create_sampling_session", sampler),
    ]

    assert [answer.status for answer in answers] == [400, 400, 400]


def test_a_checkpoint_that_does_not_exist_is_not_found(run: Run) -> None:
    uri = f"tinker://{run.model_id}/weights/never-saved"

    assert run.server.post("weights_info", {"tinker_path": uri}).status == 404


def test_a_load_in_both_forms_or_in_none_is_refused(run: Run) -> None:
    path = f"tinker://{run.model_id}/weights/x"

    answer = run.server.post("load_weights", {"path": path, "optimizer": False})

    assert answer.status == 400
    assert "give either model_id and seq_id" in answer.detail


@pytest.fixture(scope="module")
def sampler(run: Run) -> str:
    body = {"session_id": run.session, "sampling_session_seq_id": 0, "base_model": MODEL}
    return str(run.server.post("create_sampling_session", body).json()["sampling_session_id"])


def a_sample(sampler: str, seq_id: int, **changes: object) -> dict[str, object]:
    request = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
    }
    return {**request, **changes}


def chunks(*chunk: dict[str, object]) -> dict[str, object]:
    return {"prompt": {"chunks": list(chunk)}}


BAD_SAMPLES = {
    "no prompt": (chunks(), "prompt has 0 tokens"),
    "an image": (chunks({"type": "image", "data": "aaaa"}), "chunk type 'image' is not served"),
    "a token of text": (chunks({"type": "encoded_text", "tokens": ["a"]}), "tokens"),
    "a huge token": (chunks({"type": "encoded_text", "tokens": [1 << 40]}), "32-bit"),
    "an unknown token": (chunks({"type": "encoded_text", "tokens": [VOCAB_SIZE]}), "vocabulary"),
    "a negative token": (chunks({"type": "encoded_text", "tokens": [-1]}), "vocabulary"),
    "too long": ({"sampling_params": {"max_tokens": CONTEXT}}, "at most 509"),
    "no samples": ({"num_samples": 0}, "num_samples"),
    "cold": ({"sampling_params": {"temperature": -1.0}}, "temperature"),
    "top_p of zero": ({"sampling_params": {"top_p": 0.0}}, "top_p"),
    "an empty stop": ({"sampling_params": {"stop": [""]}}, "empty string"),
    "targets of floats": (
        {"target_prompt_logprobs": {"data": [1.0, 2.0], "dtype": "float32", "shape": [2, 1]}},
        "int64 tensor of shape [2, K]",
    ),
    "targets of another length": (
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        "int64 tensor of shape [2, K]",
    ),
    "stability": ({"record_stability_info": True}, "no public definition"),
    "too many last": ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "last_n"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_is_refused_at_once(run: Run, sampler: str, name: str) -> None:
    changes, reason = BAD_SAMPLES[name]

    answer = run.server.post("asample", a_sample(sampler, 1000, **changes))

    assert answer.status == 400
    assert reason in answer.detail


def test_a_sample_number_used_again_with_other_content_is_refused(run: Run, sampler: str) -> None:
    first = run.server.post("asample", a_sample(sampler, 1))
    same = run.server.post("asample", a_sample(sampler, 1))
    other = run.server.post("asample", a_sample(sampler, 1, num_samples=2))

    assert first.json() == same.json()
    assert other.status == 400


def test_a_body_about_two_sessions_is_refused(run: Run, sampler: str) -> None:
    """The proxy must not check one session's owner and the head sample from another."""
    hidden = {"x": {"sampling_session_id": sampler}}

    answer = run.server.post("asample", {**hidden, **a_sample("victim:sample:0", 2)})

    assert answer.status == 400
    assert "send each id once" in answer.detail


def test_malformed_ids_are_refused(run: Run) -> None:
    for request_id in ("", "x", "a:train:0", "a:train:x:1", "../:train:0:1", "a:b:0:1"):
        assert run.server.post("retrieve_future", {"request_id": request_id}).status == 400


def test_json_that_is_none_is_refused(run: Run) -> None:
    nested = b"[" * 100_000
    for path in ("create_model", "optim_step", "asample", "create_session", "retrieve_future"):
        for body in (b"", b"{", b"[]", b"null", b'"x"', nested):
            answer = run.server.request("POST", f"/api/v1/{path}", body)

            assert answer.status == 400, (path, body[:10], answer.body)


def test_a_large_json_body_is_refused(run: Run) -> None:
    body = b'{"sdk_version": "' + b"x" * (2 << 20) + b'"}'

    assert run.server.request("POST", "/api/v1/create_session", body).status == 413


def test_lists_refuse_absurd_pages(run: Run) -> None:
    for query in ("limit=0", "limit=100000", "offset=-1", "limit=x", "access_scope=all"):
        assert run.server.request("GET", f"/api/v1/training_runs?{query}").status == 400


def test_a_gradient_that_is_not_finite_is_dropped(run: Run) -> None:
    huge = np.full(3, 3e38, np.float32)

    run.train(run.batch(weights=huge).SerializeToString())
    applied = run.outcome(run.send("optim_step", adam_params={"learning_rate": 0.1}))

    assert "NaN or an infinity" in str(applied["error"])


def test_a_step_that_failed_in_part_is_not_applied(run: Run) -> None:
    before = run.step()
    sound = run.batch()
    broken = run.batch(loss_fn="rmsprop")
    run.train(sound.SerializeToString())
    failed = run.train(broken.SerializeToString())
    applied = run.outcome(run.send("optim_step", adam_params={"learning_rate": 10.0}))

    assert "not applied" in str(applied["error"])
    assert "rmsprop" in str(run.outcome(failed)["error"])
    assert run.step() <= before
