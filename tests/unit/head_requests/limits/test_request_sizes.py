"""Requests count with their size in memory, not with their size on the wire."""

from pathlib import Path

import numpy as np
import orjson
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_protocol.heads.launch import Limits, SamplerSpec
from tinkercloud_protocol.requests import sampling_requests
from tinkercloud_protocol.requests.batch_checks import MAX_PARTS
from tinkercloud_protocol.requests.payloads import COUNTED_BYTES, decode_forward_backward
from tinkercloud_protocol.requests.sampling_requests import MAX_CHUNKS, SampleRequest, parse_sample
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.envelope import TrainingEnvelope, peek_training
from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded
from tinkercloud_protocol.wire.ids import SamplingSessionId
from tinkercloud_protocol.wire.json_model import parse_json
from tinkercloud_testing.serving.bare_heads import MODEL, a_head
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.engine.sampling.sampling_request import prepare
from tinkercloud_worker.head.order.requests import receive_batch, receive_json

LARGE = ModelLimits(vocab_size=1 << 20, max_context_length=1 << 20)


def a_sparse_batch(*shapes: tuple[int, int], tokens: int = 1) -> pb.ForwardBackwardRequest:
    """Return a batch of one datum for each shape, whose targets name nothing."""
    message = pb.ForwardBackwardRequest(model_id=str(MODEL), seq_id=2, loss_fn="cross_entropy")
    for shape in shapes:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.full(tokens, 5, "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype = pb.DTYPE_INT64
        targets.shape.extend(shape)
        targets.sparse_csr.crow_indices = np.zeros(tokens + 1, "<i8").tobytes()
    return message


def test_sparse_tensors_with_too_large_a_total_are_rejected_before_expansion() -> None:
    body = a_sparse_batch(*[(1, 1 << 24)] * 3).SerializeToString()

    with pytest.raises(InvalidRequest, match="expand to 402653184 bytes"):
        decode_forward_backward(body)


@pytest.mark.parametrize("shape", [(0, 2**62), (2**31, 1), (2, 1)])
def test_a_sparse_tensor_has_a_row_for_each_token(shape: tuple[int, int]) -> None:
    with pytest.raises(
        InvalidRequest, match=r"sparse tensors expand to|but model_input has 1 tokens"
    ):
        decode_forward_backward(a_sparse_batch(shape).SerializeToString())


@pytest.mark.parametrize("targets", [1025, 2_000_000])
def test_a_tensor_has_no_more_values_per_position_than_a_sample_may_have(targets: int) -> None:
    message = a_sparse_batch((8, targets), tokens=8)
    place = TrainingEnvelope(str(MODEL), 2)

    refused = receive_batch(message.SerializeToString(), place).content

    assert isinstance(refused, InvalidRequest)
    assert f"shape [8, {targets}] has {targets} values per position; at most 1024" in (
        refused.message
    )
    sound = receive_batch(a_sparse_batch((8, 1024), tokens=8).SerializeToString(), place)
    assert not isinstance(sound.content, InvalidRequest)


@pytest.mark.parametrize("sizes", [1 << 10, 1 << 16])
def test_a_tensor_with_too_many_dimensions_is_rejected_with_a_short_message(sizes: int) -> None:
    message = a_sparse_batch((1, 1))
    message.data[0].loss_fn_inputs["target_tokens"].shape.extend([2**62] * sizes)
    place = TrainingEnvelope(str(MODEL), 2)

    # In its place in the order: an error of another kind would leave a hole there.
    refused = receive_batch(message.SerializeToString(), place).content

    assert isinstance(refused, InvalidRequest)
    assert f"{sizes + 2} dimensions" in refused.message
    assert len(refused.message) < 200


def test_a_batch_with_too_many_empty_parts_is_rejected() -> None:
    message = pb.ForwardBackwardRequest(model_id=str(MODEL), seq_id=1)
    message.data.extend([pb.Datum()] * (MAX_PARTS + 1))

    with pytest.raises(InvalidRequest, match=f"has at least {MAX_PARTS + 1} datums"):
        decode_forward_backward(message.SerializeToString())


def test_a_batch_with_too_many_settings_is_rejected_before_parsing() -> None:
    names = [f"{number:x}" for number in range(MAX_PARTS + 1)]
    numbers = pb.ForwardBackwardRequest(loss_fn_config=dict.fromkeys(names, 1.0))
    values = pb.ForwardBackwardRequest()
    for name in names:
        values.loss_fn_config_v2[name].number = 1.0

    for message in (numbers, values):
        with pytest.raises(InvalidRequest, match="chunks, tensors and settings in total"):
            decode_forward_backward(message.SerializeToString())


def a_field(number: int, content: bytes) -> bytes:
    """Return a protobuf field of bytes."""
    length, size = b"", len(content)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


@pytest.mark.parametrize(
    "body",
    [
        a_field(3, b"") * (COUNTED_BYTES // 2 + 1),
        a_field(3, a_field(1, b"") * (COUNTED_BYTES // 2)),
        a_field(3, a_field(2, b"\x0a\x01a") * (COUNTED_BYTES // 5)),
        a_field(5, b"\x0a\x01a") * (COUNTED_BYTES // 5 + 1),
        a_field(3, b"") + b"\x30\x01" * (COUNTED_BYTES // 2),
    ],
    ids=["datums", "chunks", "tensors", "settings", "flags"],
)
def test_parts_of_a_long_body_are_counted_before_it_is_parsed(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pb, "ForwardBackwardRequest", None)
    assert len(body) > COUNTED_BYTES

    with pytest.raises(InvalidRequest, match=f"has at least {MAX_PARTS + 1} datums"):
        decode_forward_backward(body)


def test_a_long_body_of_few_parts_is_parsed_and_an_invalid_one_is_rejected() -> None:
    message = pb.ForwardBackwardRequest(model_id=str(MODEL), seq_id=1, loss_fn="cross_entropy")
    for _ in range(40):
        message.data.add().model_input.add().encoded_text.tokens = bytes(4 * 40_000)
    body = message.SerializeToString()
    assert len(body) > COUNTED_BYTES

    assert len(decode_forward_backward(body).data) == 40
    for broken in (body[:-1], body + b"\x07", b"\xff" * (COUNTED_BYTES + 1)):
        with pytest.raises(InvalidRequest, match="not valid protobuf"):
            decode_forward_backward(broken)


def test_a_sample_with_too_many_chunks_is_rejected_before_parsing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = b'{"type":"encoded_text","tokens":[]}'
    body = b'{"prompt":{"chunks":[%b]}}' % b",".join([chunk] * 100_000)
    monkeypatch.setattr(sampling_requests, "parse_json", None)

    with pytest.raises(
        InvalidRequest, match="100002 JSON objects, but a prompt may have at most 65536"
    ):
        parse_sample(body)


def test_a_sample_with_the_maximum_number_of_chunks_is_accepted() -> None:
    chunk = b'{"type":"encoded_text","tokens":[]}'
    place = b'"sampling_session_id":"s:sample:0","seq_id":0'
    chunks = b",".join([chunk] * MAX_CHUNKS)

    request = parse_sample(b'{%b,"prompt":{"chunks":[%b]}}' % (place, chunks))

    assert len(request.prompt.chunks) == MAX_CHUNKS


def test_alternatives_of_sampled_tokens_are_limited_per_request() -> None:
    params = {"max_tokens": 1 << 12, "stop": []}
    asked = {"num_samples": 32, "topk_sample_logprobs": 1024, "sampling_params": params}

    with pytest.raises(InvalidRequest, match="32 samples of up to 4096 tokens with 1024"):
        prepare(a_sample(0, 2, **asked), LARGE, frozenset(), 0)

    fewer = prepare(a_sample(0, 2, **asked | {"num_samples": 16}), LARGE, frozenset(), 0)
    assert fewer.top_logprobs == 1024


def test_a_queued_rejection_does_not_quote_long_names() -> None:
    message = a_sparse_batch()
    message.data.add().loss_fn_inputs["x" * 100_000].dtype = pb.DTYPE_INT64
    message.data[0].loss_fn_inputs["x" * 100_000].shape.append(-1)
    metadata = {"model_id": str(MODEL), "seq_id": 2, "user_metadata": {"x" * 100_000: "y"}}

    place = TrainingEnvelope(str(MODEL), 2)
    batch = receive_batch(message.SerializeToString(), place)
    save = receive_json(routes.SAVE_WEIGHTS, orjson.dumps(metadata))

    for refused in (batch, save):
        assert isinstance(refused.content, InvalidRequest)
        assert refused.size == 0
        assert len(refused.content.message) < 300


async def test_a_queued_batch_counts_with_the_size_of_its_dense_tensors(tmp_path: Path) -> None:
    body = a_sparse_batch(*[(1, 1000)] * 10).SerializeToString()
    with a_head(tmp_path.as_uri(), tmp_path, "g1", limits=Limits(max_queued_bytes=50_000)) as head:
        await head.begin()
        assert len(body) < 1000

        with pytest.raises(Overloaded, match="bytes of requests are queued"):
            head.service.submit(receive_batch(body, peek_training(body)))


def a_sample(seq_id: int, tokens: int, **fields: object) -> SampleRequest:
    body = {
        "sampling_session_id": "s:sample:0",
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * tokens}]},
        "sampling_params": {"max_tokens": 400, "stop": []},
        **fields,
    }
    return parse_json(SampleRequest, orjson.dumps(body))


def empty_targets(rows: int, columns: int) -> dict[str, object]:
    return {
        "data": [],
        "dtype": "int64",
        "shape": [rows, columns],
        "sparse_crow_indices": [0] * (rows + 1),
        "sparse_col_indices": [],
    }


async def test_queued_samples_count_with_the_size_of_their_targets(tmp_path: Path) -> None:
    limits = Limits(max_queued_bytes=10_000)
    with a_head(tmp_path.as_uri(), tmp_path, "g1", limits=limits) as head:
        service = head.service
        service.register_sampler(SamplingSessionId("s", 0), SamplerSpec(owner="me"))
        first, second = (
            service.samples.prepare(a_sample(n, 2, target_prompt_logprobs=empty_targets(1, 1000)))
            for n in range(2)
        )
        request_id = service.sample(first)

        with pytest.raises(Overloaded, match="bytes of sampling requests of owner"):
            service.sample(second)
        assert service.sample(first) == request_id

        await service.retrieve(str(request_id))
        assert service.sample(second) == second.request_id


@pytest.mark.parametrize(
    "asked",
    [
        {"topk_prompt_logprobs": 1024},
        {"prompt_alt_tokens_k": 1024},
        {"topk_prompt_logprobs": 500, "prompt_alt_tokens_k": 500},
        {"target_prompt_logprobs": empty_targets(19_999, 1000)},
    ],
)
def test_the_number_of_values_per_prompt_is_limited(asked: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="maximum for a prompt of 20000 tokens is 838"):
        prepare(a_sample(0, 20_000, **asked), LARGE, frozenset(), 0)

    few = prepare(a_sample(0, 20_000, topk_prompt_logprobs=838), LARGE, frozenset(), 0)
    assert few.prompt_logprobs.top_k == 838
