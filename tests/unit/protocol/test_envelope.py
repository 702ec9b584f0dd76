"""What the proxy reads of a body is what the head reads of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_protocol.requests.training_requests import OptimStepRequest
from tinkercloud_protocol.wire.envelope import (
    PREFIX_BYTES,
    peek_json,
    peek_json_place,
    peek_training,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import parse_json

ids = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60)

MODEL = "s:train:0"


@given(ids, st.integers(1, 2**31 - 1))
def test_the_prefix_of_a_batch_names_its_model_and_place(model_id: str, seq_id: int) -> None:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="x" * 10_000)

    envelope = peek_training(message.SerializeToString()[:PREFIX_BYTES])

    assert (envelope.model_id, envelope.seq_id) == (model_id, seq_id)


@given(st.integers(-(2**31), 2**31 - 1))
def test_a_number_is_read_as_protobuf_reads_it(seq_id: int) -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=seq_id)

    assert peek_training(message.SerializeToString()).seq_id == seq_id


@given(st.binary(max_size=200))
def test_bytes_are_either_refused_or_read_as_protobuf_reads_them(data: bytes) -> None:
    try:
        envelope = peek_training(data)
    except InvalidRequest:
        return

    assert data[0] == 0x0A
    assert envelope.model_id.encode() in data


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_a_key_inside_a_string_is_not_mistaken_for_a_key(text: str) -> None:
    trap = 'x"model_id":"victim"' + text
    body = json.dumps({"note": trap, "model_id": "mine", "seq_id": 1}).encode()

    assert peek_json(body, "model_id") == "mine"
    assert parse_json(OptimStepRequest, body).model_id == "mine"


@pytest.mark.parametrize(
    ("beginning", "place"),
    [
        (b'{"model_id": "s:train:0", "seq_id": 12, "path": "xx', {"model_id": MODEL, "seq_id": 12}),
        (
            b'{"path": "x", "seq_id":12 ,"model_id":"s:train:0","a',
            {"model_id": MODEL, "seq_id": 12},
        ),
        (b'{"model_id": "s:train:0", "seq_id": 12', {"model_id": MODEL}),
        (b'{"seq_id": "12", "model_id": "s:trai', {}),
    ],
)
def test_a_place_is_read_whole_or_not_at_all(beginning: bytes, place: dict[str, object]) -> None:
    assert json.loads(peek_json_place(beginning)) == place


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InvalidRequest, match="model_id: required"):
        peek_json(b'{"seq_id": 1}', "model_id")
