"""An invalid sampling request is rejected immediately."""

from base64 import b64encode
from collections.abc import Sequence

import pytest

from tinkercloud_testing.clients.raw_run import CONTEXT, MODEL, VOCAB_SIZE, Run
from tinkercloud_testing.small_models.pictures import picture


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


def targets(data: list[float], **fields: object) -> dict[str, object]:
    return {"target_prompt_logprobs": {"data": data, "dtype": "int64", "shape": [2, 1], **fields}}


def sparse(
    shape: list[int], *, crow: Sequence[int] = (0, 1, 1), col: Sequence[int] = (0,)
) -> dict[str, object]:
    return targets([5], shape=shape, sparse_crow_indices=crow, sparse_col_indices=col)


BAD_SAMPLES: dict[str, tuple[dict[str, object], str]] = {
    "no prompt": (chunks(), "tokens, got 0"),
    "audio": (chunks({"type": "dmel", "dmel": "aaaa"}), "chunk type 'dmel' (audio) is not"),
    "an image": (
        chunks({"type": "image", "data": b64encode(picture(8, 8)).decode(), "format": "png"}),
        "prompt: image 0: this model reads text only",
    ),
    "an image of another format": (
        chunks({"type": "image", "data": b64encode(picture(8, 8)).decode(), "format": "jpeg"}),
        "prompt.chunks[0]: format is 'jpeg', but the data is 'png'",
    ),
    "an address of an image": (
        chunks({"type": "image_asset_pointer", "location": "http://a/b.png", "format": "png"}),
        "prompt.chunks[0].location: only data: URLs are accepted",
    ),
    "a token of text": (chunks({"type": "encoded_text", "tokens": ["a"]}), "tokens"),
    "a huge token": (chunks({"type": "encoded_text", "tokens": [1 << 40]}), "vocabulary"),
    "an unknown token": (
        chunks(
            {"type": "encoded_text", "tokens": [1]},
            {"type": "encoded_text", "tokens": [1, 2, VOCAB_SIZE]},
        ),
        f"prompt.chunks[1].tokens[2]: token ids must be in 0..{VOCAB_SIZE - 1} (the model's",
    ),
    "a negative token": (chunks({"type": "encoded_text", "tokens": [-1]}), "vocabulary"),
    "too long": ({"sampling_params": {"max_tokens": CONTEXT}}, "at most 510"),
    "no samples": ({"num_samples": 0}, "num_samples"),
    "cold": ({"sampling_params": {"temperature": -1.0}}, "temperature"),
    "top_p of zero": ({"sampling_params": {"top_p": 0.0}}, "top_p"),
    "very many stops": (
        {"sampling_params": {"stop": ["a"] * 1025}},
        "sampling_params.stop: must have at most 1024 entries, got 1025",
    ),
    "a very long stop": (
        {"sampling_params": {"stop": ["a", "b" * 1025]}},
        "strings must have at most 1024 characters, got 1025",
    ),
    "a stop that is no token": (
        {"sampling_params": {"stop": [5, VOCAB_SIZE]}},
        f"sampling_params.stop[1]: token ids must be in 0..{VOCAB_SIZE - 1} (the model's",
    ),
    "a negative stop": ({"sampling_params": {"stop": [-1]}}, "sampling_params.stop[0]: token ids"),
    "an empty stop": ({"sampling_params": {"stop": [""]}}, "empty strings"),
    "targets of floats": (
        {"target_prompt_logprobs": {"data": [1.0, 2.0], "dtype": "float32", "shape": [2, 1]}},
        "int64 tensor of shape [2, K]",
    ),
    "targets of another length": (
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        "int64 tensor of shape [2, K]",
    ),
    "targets of fractions": (targets([1, 1e300]), "64-bit integers (dtype int64), got 1e+300"),
    "a target of 65 bits": (targets([1, 2**64 - 1]), "64-bit integers (dtype int64), got 1.8"),
    "targets of no shape": (targets([], shape=[2, -5]), "target_prompt_logprobs.shape.1"),
    "targets in negative columns": (sparse([2, -5]), "target_prompt_logprobs.shape.1"),
    "targets in very many columns": (sparse([2, 2**45]), "at most 1024 token ids per position"),
    "targets in columns that do not exist": (
        sparse([2, 2], col=[2**63]),
        "target_prompt_logprobs.sparse_col_indices.0",
    ),
    "targets in rows that do not exist": (
        sparse([2, 2], crow=[0, 2**63, 1]),
        "target_prompt_logprobs.sparse_crow_indices.1",
    ),
    "targets in rows that fall": (sparse([2, 2], crow=[0, 2, 1]), "crow_indices must increase"),
    "a prompt of wrong tokens": (
        chunks({"type": "encoded_text", "tokens": [[]] * 10_000}),
        "prompt.chunks.0.tokens.0: Input should be a valid integer (got [])",
    ),
    "last tokens of no question": ({"prompt_logprobs_last_n": 1}, "or topk_prompt_logprobs"),
    "too many last": ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "last_n"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_an_invalid_sampling_request_is_rejected_immediately(
    run: Run, sampler: str, name: str
) -> None:
    changes, reason = BAD_SAMPLES[name]

    answer = run.server.post("asample", a_sample(sampler, 1000, **changes))

    assert answer.status == 400
    assert reason in answer.detail


def test_a_reused_sample_number_with_different_content_is_rejected(run: Run, sampler: str) -> None:
    first = run.server.post("asample", a_sample(sampler, 1))
    same = run.server.post("asample", a_sample(sampler, 1))
    other = run.server.post("asample", a_sample(sampler, 1, num_samples=2))

    assert first.json() == same.json()
    assert other.status == 400


def test_a_body_with_two_sessions_is_rejected(run: Run, sampler: str) -> None:
    """The proxy must not check one session's owner and the head sample from another."""
    hidden = {"x": {"sampling_session_id": sampler}}

    answer = run.server.post("asample", {**hidden, **a_sample("victim:sample:0", 2)})

    assert answer.status == 400
    assert "send each id once" in answer.detail
