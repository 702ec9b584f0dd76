"""The protobuf codec against the SDK's own converters, in both directions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from tinkercloud_protocol.requests.payloads import (
    decode_forward_backward,
    encode_forward_backward_output,
    encode_sample_response,
)
from tinkercloud_protocol.requests.tensors import (
    PromptScores,
    SampledSequence,
    TopLogprobs,
    densify,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.data import a_datum, a_request

token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def sdk_data(draw: st.DrawFn) -> types.Datum:
    pieces = draw(st.lists(token_lists, min_size=1, max_size=3))
    length = sum(map(len, pieces))
    chunks = [types.EncodedTextChunk(tokens=piece) for piece in pieces]
    weights = draw(st.lists(floats, min_size=length, max_size=length))
    return types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=list(range(length)), dtype="int64", shape=[length]
            ),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[length]),
        },
    )


def encode(data: list[types.Datum], config: dict[str, float | str] | None = None) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=data, loss_fn="cross_entropy", loss_fn_config=config
        ),
        model_id="s:train:0",
        seq_id=3,
    )
    return forward_backward_request_to_proto(request).SerializeToString()


@given(st.lists(sdk_data(), min_size=1, max_size=4))
def test_what_the_sdk_encodes_is_read_whole(data: list[types.Datum]) -> None:
    request = decode_forward_backward(encode(data, {"beta": 0.5, "name": "x"}))

    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", 3, "cross_entropy")
    assert dict(request.loss_fn_config) == {"beta": 0.5, "name": "x"}
    for datum, original in zip(request.data, data, strict=True):
        assert datum.tokens.tolist() == original.model_input.to_ints()
        for name, tensor in original.loss_fn_inputs.items():
            np.testing.assert_array_equal(datum.inputs[name], tensor.to_numpy())


@given(
    hnp.arrays(
        np.int64, st.tuples(st.integers(1, 8), st.integers(1, 8)), elements=st.integers(0, 3)
    )
)
def test_sparse_tensors_are_the_dense_ones_they_stand_for(dense: np.ndarray) -> None:
    sparse = types.TensorData.from_torch_sparse(torch.from_numpy(dense))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1] * len(dense)),
        loss_fn_inputs={"target_tokens": sparse},
    )

    (decoded,) = decode_forward_backward(encode([datum])).data

    np.testing.assert_array_equal(decoded.inputs["target_tokens"], dense)


@given(
    st.lists(
        hnp.arrays(
            np.float32, hnp.array_shapes(min_dims=1, max_dims=2, max_side=6), elements=floats
        ),
        min_size=1,
        max_size=6,
    )
)
def test_outputs_of_any_shapes_reach_the_sdk_in_order(arrays: list[np.ndarray]) -> None:
    losses = [-array for array in arrays]
    outputs = {"logprobs": arrays, "elementwise_loss": losses}

    body = encode_forward_backward_output(outputs, {"loss:sum": 1.5})

    output = deserialize_forward_backward_output(body)

    assert output.metrics == {"loss:sum": 1.5}
    for index, record in enumerate(output.loss_fn_outputs):
        assert record.keys() == outputs.keys()
        for name, expected in outputs.items():
            assert record[name].shape == list(expected[index].shape)
            np.testing.assert_array_equal(record[name].to_numpy(), expected[index])
    assert len(output.loss_fn_outputs) == len(arrays)


@settings(max_examples=30)
@given(st.lists(st.tuples(token_lists, st.booleans()), min_size=1, max_size=3))
def test_samples_reach_the_sdk(drawn: list[tuple[list[int], bool]]) -> None:
    top = TopLogprobs(np.ones((2, 3), np.int32), np.full((2, 3), -0.5, np.float32))
    sequences = [
        SampledSequence(tokens, [-1.0] * len(tokens), stopped, top) for tokens, stopped in drawn
    ]
    targets = np.array([[-1.0], [np.nan]], np.float32)
    alternatives = (np.array([[4], [5]], np.int64), np.array([[-2.0], [-3.0]], np.float32))
    prompt = PromptScores(np.array([np.nan, -1.0, -2.0], np.float32), top, targets, alternatives, 7)

    response = deserialize_sample_response(encode_sample_response(sequences, prompt))

    got = [(list(s.tokens), s.stop_reason == "stop") for s in response.sequences]
    assert got == [(tokens, stopped) for tokens, stopped in drawn]
    assert response.prompt_logprobs == [None, -1.0, -2.0]
    assert response.prompt_cache_hit_tokens == 7
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.tolist() == [[4], [5]]
    assert response.target_prompt_logprobs is not None
    np.testing.assert_array_equal(response.target_prompt_logprobs.to_numpy(), targets)
    assert response.topk_prompt_logprobs is not None
    assert response.sequences[0].topk_logprobs is not None


def test_equal_content_has_equal_digests_however_it_was_encoded() -> None:
    one = a_request([a_datum([1, 2, 3], weights=np.ones(3, np.float32))])
    reordered = a_request([a_datum([1, 2, 3], weights=np.ones(3, np.float32))])
    object.__setattr__(
        reordered.data[0], "inputs", dict(reversed(list(reordered.data[0].inputs.items())))
    )
    other = a_request([a_datum([1, 2, 3], weights=np.full(3, 2, np.float32))])

    assert one.digest() == reordered.digest()
    assert one.digest() != other.digest()
    assert one.digest() != a_request(one.data, forward_only=True).digest()
    assert one.digest() != a_request([*one.data, *one.data]).digest()


def test_cells_a_sparse_tensor_does_not_list_take_the_fill() -> None:
    dense = densify(
        np.array([7]), np.array([0, 0, 1]), np.array([1]), shape=[2, 3], where="x", fill=-1
    )

    assert dense.tolist() == [[-1, -1, -1], [-1, 7, -1]]


@pytest.mark.parametrize(
    "crow",
    [
        # Differences of 64 bits that wrap round to counts of 2**62 and more.
        [0, 2**62, 2**63 - 1, -(2**63), -(2**62), 1],
        [0, 1, 0, 1, 1, 1],
        [0, 2, 2, 2, 2, 1],
        [0, -1, -1, 0, 0, 1],
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 2],
        [0, 1],
        [],
    ],
)
def test_row_indices_that_do_not_rise_from_zero_to_the_number_of_values_are_refused(
    crow: list[int],
) -> None:
    one = np.zeros(1, np.int64)

    with pytest.raises(InvalidRequest, match="crow_indices must increase"):
        densify(one, np.array(crow, np.int64), one, shape=[5, 1000], where="x")
