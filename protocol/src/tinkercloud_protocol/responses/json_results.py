"""Results in JSON, converted from the protobuf in which they are kept.

For clients that do not accept protobuf: plain HTTP clients, and SDKs before 0.25. The fields are
those of the SDK's own JSON. float32 values are written as the doubles they are equal to, so they
keep every bit. NaN, which JSON lacks, becomes null: a position that was not scored.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tinkercloud_protocol import messages_pb2 as pb
from tinkercloud_protocol.requests.tensors import EMPTY_TOP_LOGPROB, EMPTY_TOP_TOKEN

_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}

Json = dict[str, Any]


def forward_backward_as_json(body: bytes) -> bytes:
    """Return the result of forward_backward in JSON.

    Args:
        body: a protobuf ForwardBackwardOutput.

    Returns:
        `{"loss_fn_output_type", "loss_fn_outputs", "metrics"}`. The outputs are one object per
        datum, with a tensor `{"data", "dtype", "shape"}` per name: `logprobs` and
        `elementwise_loss`, the request's loss per target.
    """
    message = pb.ForwardBackwardOutput.FromString(body)
    answer = {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": [
            output for record in message.loss_fn_outputs for output in _outputs(record)
        ],
        "metrics": dict(message.metrics),
    }
    return _dumped(answer)


def sample_as_json(body: bytes) -> bytes:
    """Return the result of a sampling request in JSON.

    Args:
        body: a protobuf SampleResponse.

    Returns:
        `{"type", "sequences", "prompt_cache_hit_tokens", ...}`, and the scores that were requested:
        `prompt_logprobs`, `topk_prompt_logprobs`, `target_prompt_logprobs`, `prompt_alt_tokens`. A
        sequence is `{"tokens", "logprobs", "stop_reason", "finish_reason"}`; the last two are
        equal. A top-k table has a list of `[token, logprob]` per position, or null.
    """
    message = pb.SampleResponse.FromString(body)
    answer: Json = {
        "type": "sample",
        "sequences": [_sequence(sequence) for sequence in message.sequences],
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.HasField("prompt_logprobs"):
        answer["prompt_logprobs"] = _floats(message.prompt_logprobs)
    if message.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _table(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        answer["target_prompt_logprobs"] = _dense(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        answer["prompt_alt_tokens"] = {
            "tokens": _dense(message.prompt_alt_tokens.tokens),
            "logprobs": _dense(message.prompt_alt_tokens.logprobs),
        }
    return _dumped(answer)


def _outputs(record: pb.ArrayRecord) -> Iterator[Json]:
    """Yield the outputs of each datum of a record."""
    names = list(record.fields)
    offsets = {name: np.frombuffer(record.fields[name].offsets, "<i8") for name in names}
    for index in range(record.num_datums):
        yield {
            name: _tensor(
                record.fields[name].data[offsets[name][index] : offsets[name][index + 1]],
                record.fields[name].dtype,
                (-1, *record.fields[name].trailing_shape),
            )
            for name in names
        }


def _sequence(sequence: pb.SampledSequence) -> Json:
    reason = _STOP_REASONS[sequence.stop_reason]
    answer: Json = {
        "tokens": np.frombuffer(sequence.tokens, "<i4"),
        "logprobs": _floats(sequence.logprobs),
        "stop_reason": reason,
        "finish_reason": reason,
    }
    if sequence.HasField("topk_sampled_logprobs"):
        answer["topk_sampled_logprobs"] = _table(sequence.topk_sampled_logprobs)
    return answer


def _table(top: pb.TopkLogprobs) -> orjson.Fragment:
    """Return the filled cells of a top-k table by position; null where there are none."""
    tokens = np.frombuffer(top.token_ids, "<i4").reshape(top.length, top.k)
    logprobs = np.frombuffer(top.logprobs, "<f4").reshape(top.length, top.k)
    is_empty = (tokens == EMPTY_TOP_TOKEN) & (logprobs == np.float32(EMPTY_TOP_LOGPROB))
    # Row by row: the cells of all rows would take ten times the memory as Python objects.
    rows = [
        _dumped(list(zip(row[~empty].tolist(), scores[~empty].tolist(), strict=True)) or None)
        for row, scores, empty in zip(tokens, logprobs, is_empty, strict=True)
    ]
    return orjson.Fragment(b"[" + b",".join(rows) + b"]")


def _dense(tensor: pb.Tensor) -> Json:
    return _tensor(tensor.dense, tensor.dtype, tuple(tensor.shape))


def _tensor(data: bytes, dtype: int, shape: tuple[int, ...]) -> Json:
    if dtype == pb.DTYPE_FLOAT32:
        name, values = "float32", _floats(data)
    else:
        name, values = "int64", np.frombuffer(data, "<i8")
    return {"data": values, "dtype": name, "shape": list(values.reshape(shape).shape)}


def _floats(data: bytes) -> npt.NDArray[np.float64]:
    return np.frombuffer(data, "<f4").astype(np.float64)


def _dumped(answer: object) -> bytes:
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
