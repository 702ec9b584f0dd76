"""Batches in JSON become the same requests as in protobuf, or fail with a message."""

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tinkercloud_protocol.requests.json_payloads import decode_batch, load_batch
from tinkercloud_protocol.requests.payloads import decode_forward_backward
from tinkercloud_protocol.requests.tensors import ForwardBackwardRequest
from tinkercloud_protocol.wire.errors import InvalidRequest

MODEL = "s:train:0"
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def decoded(content: dict[str, Any]) -> ForwardBackwardRequest:
    return decode_batch(load_batch(orjson.dumps(content)))


@st.composite
def batches(draw: st.DrawFn) -> list[types.Datum]:
    """Return datums with targets of one or two dimensions, dense or sparse."""
    data = []
    for _ in range(draw(st.integers(1, 3))):
        pieces = draw(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1), min_size=1))
        length = sum(map(len, pieces))
        shape = draw(st.sampled_from([[length], [length, 1], [length, 3]]))
        size = int(np.prod(shape))
        targets = draw(st.lists(st.integers(0, 2**40), min_size=size, max_size=size))
        weights = draw(st.lists(floats, min_size=size, max_size=size))
        inputs = {
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=shape),
            "weights": types.TensorData(data=weights, dtype="float32", shape=shape),
        }
        if len(shape) == 2 and draw(st.booleans()):
            dense = np.array(weights, np.float32).reshape(shape)
            rows, columns = dense.nonzero()
            inputs["weights"] = types.TensorData(
                data=[float(value) for value in dense[rows, columns]],
                dtype="float32",
                shape=shape,
                sparse_crow_indices=[int((rows < row).sum()) for row in range(length + 1)],
                sparse_col_indices=[int(column) for column in columns],
            )
        chunks = [types.EncodedTextChunk(tokens=piece) for piece in pieces]
        data.append(types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs))
    return data


def as_protobuf(data: list[types.Datum], config: dict[str, float]) -> ForwardBackwardRequest:
    batch = types.ForwardBackwardInput(
        data=data, loss_fn="cross_entropy", loss_fn_config=config or None
    )
    request = types.ForwardBackwardRequest(forward_backward_input=batch, model_id=MODEL, seq_id=3)
    return decode_forward_backward(forward_backward_request_to_proto(request).SerializeToString())


def texts(datum: types.Datum) -> list[types.EncodedTextChunk]:
    chunks = datum.model_input.chunks
    return [chunk for chunk in chunks if isinstance(chunk, types.EncodedTextChunk)]


def tokens_as(form: str, chunks: list[list[int]]) -> object:
    whole = [token for chunk in chunks for token in chunk]
    forms: dict[str, object] = {
        "typed chunks": {"chunks": [{"type": "encoded_text", "tokens": c} for c in chunks]},
        "chunks": {"chunks": [{"tokens": c} for c in chunks]},
        "tokens": {"tokens": whole},
        "input_ids": {"input_ids": whole},
        "list": whole,
    }
    return forms[form]


def tensor_as(form: str, tensor: types.TensorData) -> object:
    fields = {
        "data": tensor.data,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "sparse_crow_indices": tensor.sparse_crow_indices,
        "sparse_col_indices": tensor.sparse_col_indices,
    }
    if form == "whole" or tensor.sparse_crow_indices is not None:
        return fields
    assert tensor.shape is not None
    wide = {"int64": np.int64, "float32": np.float64}[tensor.dtype]
    nested = np.array(tensor.data, dtype=wide).reshape(tensor.shape).tolist()
    twin = {"int64": "int64", "float32": "float64"}[tensor.dtype]
    forms: dict[str, object] = {
        "without shape": {"data": nested, "dtype": tensor.dtype},
        "float64": {**fields, "dtype": twin},
        "list": nested,
    }
    return forms[form]


@settings(max_examples=60, deadline=None)
@given(
    data=batches(),
    config=st.dictionaries(st.sampled_from(["beta", "clip"]), st.integers(0, 3)),
    tokens=st.sampled_from(["typed chunks", "chunks", "tokens", "input_ids", "list"]),
    tensors=st.sampled_from(["whole", "without shape", "float64", "list"]),
    inner=st.sampled_from([None, "forward_backward_input", "forward_input"]),
)
def test_every_form_is_the_same_request_as_in_protobuf(
    data: list[types.Datum], config: dict[str, int], tokens: str, tensors: str, inner: str | None
) -> None:
    batch = {
        "data": [
            {
                "model_input": tokens_as(tokens, [list(text.tokens) for text in texts(datum)]),
                "loss_fn_inputs": {
                    name: tensor_as(tensors, tensor)
                    for name, tensor in datum.loss_fn_inputs.items()
                },
            }
            for datum in data
        ],
        "loss_fn": "cross_entropy",
        "loss_fn_config": config or None,
    }
    content = {**(batch if inner is None else {inner: batch}), "model_id": MODEL, "seq_id": 3}

    request = decoded(content)

    expected = as_protobuf(data, {key: float(value) for key, value in config.items()})
    assert request.digest() == expected.digest()
    assert (request.model_id, request.seq_id) == (expected.model_id, expected.seq_id)


def a_batch(**changes: Any) -> dict[str, Any]:
    datum = {"model_input": [1, 2], "loss_fn_inputs": {"target_tokens": [2, 3]}}
    datum.update({key: changes.pop(key) for key in list(changes) if key in datum})
    batch = {"model_id": MODEL, "data": [datum], "loss_fn": "cross_entropy"}
    return {**batch, **changes}


def test_what_is_absent_has_its_default() -> None:
    request = decoded(a_batch())

    assert (request.seq_id, request.forward_only, request.loss_fn_config) == (0, False, {})


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("int32", [1, -1], np.array([1, -1], np.int64)),
        ("int64", [2**40, 0], np.array([2**40, 0], np.int64)),
        ("float32", [0.1, 1], np.array([0.1, 1], np.float32)),
        ("float64", [0.1, 1e-60], np.array([0.1, 0], np.float32)),
        ("bool", [True, False], np.array([1, 0], np.float32)),
        ("bool", [1, 0], np.array([1, 0], np.float32)),
        (None, [True, 0.5], np.array([1, 0.5], np.float32)),
    ],
)
def test_every_dtype_becomes_the_one_that_engines_compute_with(
    dtype: str | None, values: list[Any], expected: np.ndarray[Any, Any]
) -> None:
    tensor = {"data": values, "dtype": dtype, "shape": [2]}
    request = decoded(a_batch(loss_fn_inputs={"weights": tensor, "target_tokens": [2, 3]}))

    inputs = request.data[0].inputs
    assert inputs["weights"].dtype == expected.dtype
    assert inputs["weights"].tobytes() == expected.tobytes()
    assert inputs["target_tokens"].dtype == np.int64


INVALID: dict[str, dict[str, Any]] = {
    "data: required, and must be a list, got nothing": {"data": None},
    "data[0]: must be an object, got 5": {"data": [5]},
    "loss_fn: required, and must be a string, got nothing": {"loss_fn": None},
    "model_id: required, and must be a string, got 5": {"model_id": 5},
    "seq_id: must be an integer from 1 to 2147483647, or absent, got 0": {"seq_id": 0},
    "forward_only: must be true or false, got 'yes'": {"forward_only": "yes"},
    "loss_fn_config['beta']: must be a number or text, got True": {
        "loss_fn_config": {"beta": True}
    },
    "forward_backward_input: must be an object, got [1]": {"forward_backward_input": [1]},
    "data[0].model_input: must be a list of token ids, or an object with one of chunks, tokens and"
    " input_ids, got nothing": {"model_input": None},
    "data[0].model_input.chunks[1].data: must be base64, got 'x'": {
        "model_input": {
            "chunks": [{"tokens": [1]}, {"type": "image", "data": "x", "format": "png"}]
        }
    },
    "data[0].model_input.chunks[0]: chunk type 'dmel' (audio) is not supported": {
        "model_input": {"chunks": [{"type": "dmel", "dmel": "x"}]}
    },
    "data[0].model_input: must contain integers only, got 1.5": {"model_input": [1, 1.5]},
    "data[0].model_input: values must fit int32, got 1 to 2147483648": {"model_input": [1, 2**31]},
    "data[0].model_input: must contain numbers only, got 'a'": {"model_input": [1, "a"]},
    "data[0].loss_fn_inputs['w']: values must fit float32, got 1e+300": {
        "loss_fn_inputs": {"w": [1e300, 1]}
    },
    "data[0].loss_fn_inputs['w']: values must fit int64, got 18446744073709551615": {
        "loss_fn_inputs": {"w": {"data": [2**64 - 1], "dtype": "int64"}}
    },
    "data[0].loss_fn_inputs['w']: values must fit int32, got 0 to 4294967296": {
        "loss_fn_inputs": {"w": {"data": [0, 2**32], "dtype": "int32"}}
    },
    "data[0].loss_fn_inputs['w']: dtype 'bfloat16' is not supported; use one of float32, float64,"
    " int32, int64, bool": {"loss_fn_inputs": {"w": {"data": [1], "dtype": "bfloat16"}}},
    "data[0].loss_fn_inputs['w']: shape [3] needs 3 values, got 2": {
        "loss_fn_inputs": {"w": {"data": [1, 2], "dtype": "float32", "shape": [3]}}
    },
    "data[0].loss_fn_inputs['w']: all rows must be lists of the same length": {
        "loss_fn_inputs": {"w": [[1, 2], [3]]}
    },
    "data[0].loss_fn_inputs['w']: shape is [2, 1], but the data is nested as [1, 2]": {
        "loss_fn_inputs": {"w": {"data": [[1, 2]], "shape": [2, 1]}}
    },
    "data[0].loss_fn_inputs['w'] has 9 rows, but model_input has 2 tokens; they must be equal": {
        "loss_fn_inputs": {
            "w": {
                "data": [1],
                "shape": [9, 2],
                "sparse_crow_indices": [0],
                "sparse_col_indices": [0],
            }
        }
    },
    "data: sparse tensors expand to 32000000000 bytes (8 per element)": {
        "loss_fn_inputs": {
            "w": {"data": [1], "shape": [4_000_000_000, 1], "sparse_col_indices": []}
        }
    },
}


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_batch_is_rejected_by_name(message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoded(a_batch(**INVALID[message]))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "request body: not valid JSON"),
        (b"[1]", "request body: must be a JSON object, got [1]"),
        (b'{"a": NaN}', "request body: not valid JSON"),
        (b"[" * 5_000_000, "the request has about 5000000 values; at most 4194304"),
        (b"{" * 900_000, "datums, chunks, tensors and settings in total; at most 262144"),
    ],
)
def test_a_body_that_would_take_much_memory_is_rejected_unparsed(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_batch(body)
    assert message in caught.value.message
