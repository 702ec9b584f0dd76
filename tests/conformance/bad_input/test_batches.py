"""An invalid batch fails alone, with a reason."""

import gzip
from typing import Any

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_testing.clients.raw_run import CONTEXT, VOCAB_SIZE, Run, a_tensor, floats
from tinkercloud_testing.small_models.pictures import picture

BAD_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown loss": ({"loss_fn": "rmsprop"}, "loss_fn 'rmsprop' is not available"),
    "undefined loss": ({"loss_fn": "stable_reinforce"}, "no public definition"),
    "custom loss": ({"loss_fn": "custom"}, "takes one setting, 'loss_id'"),
    "unknown setting": ({"config": {"beta": 1.0}}, "not a setting of loss_fn 'cross_entropy'"),
    "setting of text": (
        {"loss_fn": "ppo", "config": {"clip_low_threshold": "low"}},
        "must be a finite number",
    ),
    "missing setting": (
        {"loss_fn": "dro", "logprobs": floats(1, 1, 1), "advantages": floats(1, 1, 1)},
        "loss_fn_config['beta']: required",
    ),
    "missing input": ({"loss_fn": "importance_sampling"}, "'logprobs']: required"),
    "unused input": ({"advantages": floats(1, 1, 1)}, "not an input of loss_fn 'cross_entropy'"),
    "lengths that disagree": (
        {"weights": floats(1, 1)},
        "must have the shape of target_tokens [3], got [2]",
    ),
    "targets that disagree": (
        {"target_tokens": np.asarray([1, 2], "<i8")},
        "must have the same length",
    ),
    "targets of floats": ({"target_tokens": floats(1, 2, 3)}, "must be int64"),
    "NaN weights": ({"weights": floats(1, np.nan, 1)}, "must be finite, got NaN or Inf"),
    "infinite weights": ({"weights": floats(1, np.inf, 1)}, "must be finite, got NaN or Inf"),
    "no tokens": ({"tokens": []}, "tokens, got 0"),
    "too many tokens": ({"tokens": [1] * (CONTEXT + 1)}, f"must have 1 to {CONTEXT} tokens"),
    "a token outside the vocabulary": ({"tokens": [1, VOCAB_SIZE]}, f"0..{VOCAB_SIZE - 1}"),
    "a negative token": ({"tokens": [1, -1]}, "vocabulary), got -1"),
    "two-dimensional policy targets": (
        {
            "loss_fn": "ppo",
            "target_tokens": np.ones((3, 2), "<i8"),
            "logprobs": np.ones((3, 2), np.float32),
            "advantages": np.ones((3, 2), np.float32),
        },
        "takes a non-empty tensor of shape [N], got [3, 2]",
    ),
    "a lower bound above the upper one": (
        {
            "loss_fn": "ppo",
            "config": {"clip_low_threshold": 1.5},
            "logprobs": floats(1, 1, 1),
            "advantages": floats(1, 1, 1),
        },
        "loss_fn_config: clip_low_threshold 1.5 is above clip_high_threshold 1.2",
    ),
    "a lower bound above the upper one at a token": (
        {
            "loss_fn": "cispo",
            "clip_low_threshold": floats(0, 5, 0),
            "logprobs": floats(1, 1, 1),
            "advantages": floats(1, 1, 1),
        },
        "data[0].loss_fn_inputs: clip_low_threshold 5 is above clip_high_threshold 4",
    ),
    "a threshold given twice": (
        {
            "loss_fn": "ppo",
            "config": {"clip_low_threshold": 0.5},
            "clip_low_threshold": floats(1, 1, 1),
            "logprobs": floats(1, 1, 1),
            "advantages": floats(1, 1, 1),
        },
        "also set in loss_fn_config",
    ),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_an_invalid_batch_fails_with_a_reason_and_has_no_side_effects(run: Run, name: str) -> None:
    arguments, reason = BAD_BATCHES[name]

    outcome = run.outcome(run.train(run.batch(**arguments).SerializeToString()))

    assert reason in str(outcome["error"])
    assert outcome["category"] == "user"


def broken_tensor(run: Run, **fields: Any) -> bytes:
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


BROKEN_TENSORS: dict[str, tuple[dict[str, object], str]] = {
    "half a value": ({"dense": b"\0\0\0"}, "not a multiple of 4"),
    "another shape": ({"dense": bytes(12), "shape": [4]}, "needs 4 values, got 3"),
    "a negative size": ({"dense": bytes(12), "shape": [-3]}, "has a negative dimension"),
    "three dimensions": ({"dense": bytes(12), "shape": [1, 3, 1]}, "one or two are accepted"),
    "a huge claim": (a_csr([0], [], 0, [1 << 40, 1 << 20]), "sparse tensors expand to"),
    "a row too few": (a_csr([0, 0], [], 0, [3, 2]), "CSR indices do not describe"),
    "a column outside": (a_csr([0, 1, 1, 1], [5], 1, [3, 2]), "CSR indices do not describe"),
    "falling rows": (a_csr([0, 2, 1, 1], [0], 1, [3, 2]), "CSR indices do not describe"),
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_an_invalid_tensor_fails_with_a_reason(run: Run, name: str) -> None:
    fields, reason = BROKEN_TENSORS[name]

    outcome = run.outcome(run.train(broken_tensor(run, **fields)))

    assert reason in str(outcome["error"])


def test_images_for_a_model_of_text_are_rejected_by_name(run: Run) -> None:
    message = run.batch()
    image = pb.ImageChunk(data=picture(8, 8), format="png")
    message.data[0].model_input.add().image.CopyFrom(image)

    outcome = run.outcome(run.train(message.SerializeToString()))

    assert "data[0].model_input: image 0: this model reads text only" in str(outcome["error"])


def test_audio_is_rejected_by_name(run: Run) -> None:
    message = run.batch()
    message.data[0].model_input.add().dmel.dmel = b"audio"

    outcome = run.outcome(run.train(message.SerializeToString()))

    assert "chunk type 'dmel' (audio) is not supported" in str(outcome["error"])


def test_bytes_that_are_not_a_batch_are_rejected_immediately(run: Run) -> None:
    bodies = [b"", b"\xff" * 100, b'{"model_id": "x"}', b"\x0a\xff\xff\xff\xff\x7f"]

    for body in bodies:
        answer = run.train(body)

        assert answer.status == 400
        assert "protobuf" in answer.detail
        assert int(answer.headers["content-length"]) == len(answer.body)


def test_a_negative_number_is_named(run: Run) -> None:
    message = run.batch()
    number, message.seq_id = message.seq_id, -1

    answer = run.train(message.SerializeToString())

    assert answer.status == 400
    assert answer.detail == "seq_id: must be 1 or more, or absent, got -1"
    message.seq_id = number
    assert run.train(message.SerializeToString()).status == 200


def test_a_batch_in_another_encoding_is_rejected_by_name(run: Run) -> None:
    body = run.batch().SerializeToString()

    answer = run.train(gzip.compress(body), **{"Content-Encoding": "gzip"})

    assert answer.status == 400
    assert answer.detail == "Content-Encoding: 'gzip' is not supported; use zstd or none"
    assert run.train(body).status == 200


def test_a_truncated_batch_fails_with_a_reason(run: Run) -> None:
    outcome = run.outcome(run.train(run.batch().SerializeToString()[:-5]))

    assert "not valid protobuf" in str(outcome["error"])


def test_a_reused_sequence_number_with_different_content_is_rejected(run: Run) -> None:
    message = run.batch()
    first = run.train(message.SerializeToString())
    same = run.train(message.SerializeToString())
    message.data[0].loss_fn_inputs["weights"].CopyFrom(a_tensor(floats(2, 2, 2)))
    other = run.train(message.SerializeToString())

    assert first.json() == same.json()
    assert other.status == 400
    assert "already used by a request with different content" in other.detail


def test_a_body_over_the_limit_is_rejected_and_leaves_no_gap(run: Run) -> None:
    message = run.batch(loss_fn="x" * (70 << 20))

    answer = run.train(message.SerializeToString())

    assert answer.status == 413
    assert "larger than" in answer.detail


def test_a_compressed_body_that_expands_over_the_limit_is_rejected(run: Run) -> None:
    message = run.batch(loss_fn="x" * (70 << 20))
    compressed = zstandard.compress(message.SerializeToString())
    assert len(compressed) < 1 << 20

    answer = run.train(compressed, **{"Content-Encoding": "zstd"})

    assert answer.status == 413


def test_a_compressed_batch_is_accepted(run: Run) -> None:
    compressed = zstandard.compress(run.batch().SerializeToString())

    answer = run.train(compressed, **{"Content-Encoding": "zstd"})

    output = run.server.result(str(answer.json()["request_id"])).body
    assert "loss:sum" in pb.ForwardBackwardOutput.FromString(output).metrics


def test_a_gradient_that_is_not_finite_is_discarded(run: Run) -> None:
    huge = np.full(3, 3e38, np.float32)

    run.train(run.batch(weights=huge).SerializeToString())
    applied = run.outcome(run.send("optim_step", adam_params={"learning_rate": 0.1}))

    assert "NaN or infinity" in str(applied["error"])


def test_a_partially_failed_step_is_not_applied(run: Run) -> None:
    before = run.step()
    sound = run.batch()
    broken = run.batch(loss_fn="rmsprop")
    run.train(sound.SerializeToString())
    failed = run.train(broken.SerializeToString())
    applied = run.outcome(run.send("optim_step", adam_params={"learning_rate": 10.0}))

    assert "not applied" in str(applied["error"])
    assert "rmsprop" in str(run.outcome(failed)["error"])
    # A valid step may raise the loss slightly; one of this size would undo all training.
    assert run.step() < before + 0.5
