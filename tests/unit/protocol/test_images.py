"""Images in prompts: what is accepted, and that all encodings of a request mean the same."""

import struct
from base64 import b64encode
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tinkercloud_protocol import messages_pb2 as pb
from tinkercloud_protocol.requests.image_files import ImagePart, header_size, read_image
from tinkercloud_protocol.requests.image_limits import ImageLimits
from tinkercloud_protocol.requests.json_payloads import decode_batch, load_batch
from tinkercloud_protocol.requests.payloads import decode_forward_backward
from tinkercloud_protocol.requests.sampling_requests import SampleRequest, parse_sample
from tinkercloud_protocol.requests.tensors import ForwardBackwardRequest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.pictures import picture

MODEL = "s:train:0"
PNG, JPEG = picture(30, 20), picture(40, 24, file_format="jpeg")

images = st.builds(
    lambda data, count: types.ImageChunk(data=data[1], format=data[0], expected_tokens=count),
    st.sampled_from([("png", PNG), ("jpeg", JPEG)]),
    st.integers(1, 9),
)
texts = st.builds(
    lambda tokens: types.EncodedTextChunk(tokens=tokens),
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
)
prompts = st.lists(st.one_of(texts, images), min_size=1, max_size=8)


def batch_of(chunks: list[Any]) -> types.ForwardBackwardInput:
    model_input = types.ModelInput(chunks=chunks)
    targets = types.TensorData(data=[1] * model_input.length, dtype="int64")
    datum = types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": targets})
    return types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")


def through_protobuf(batch: types.ForwardBackwardInput) -> ForwardBackwardRequest:
    request = types.ForwardBackwardRequest(forward_backward_input=batch, model_id=MODEL, seq_id=3)
    return decode_forward_backward(forward_backward_request_to_proto(request).SerializeToString())


def through_json(chunks: list[Any]) -> ForwardBackwardRequest:
    length = types.ModelInput(chunks=chunks).length
    datum = {
        "model_input": {"chunks": [as_json(chunk) for chunk in chunks]},
        "loss_fn_inputs": {"target_tokens": {"data": [1] * length, "dtype": "int64"}},
    }
    content = {"model_id": MODEL, "seq_id": 3, "data": [datum], "loss_fn": "cross_entropy"}
    return decode_batch(load_batch(orjson.dumps(content)))


def sample_of(*chunks: dict[str, Any]) -> SampleRequest:
    content = {"sampling_session_id": "s:sample:0", "seq_id": 1, "prompt": {"chunks": chunks}}
    return parse_sample(orjson.dumps(content))


def as_json(chunk: Any) -> dict[str, Any]:
    content: dict[str, Any] = orjson.loads(chunk.model_dump_json(exclude_none=True))
    return content


def laid_out(tokens: list[int], parts: tuple[ImagePart, ...]) -> list[Any]:
    """Return text tokens and images in the order of the prompt."""
    order: list[Any] = []
    done = 0
    for part in parts:
        order += [*tokens[done : part.offset], (part.data, part.format, part.expected_tokens)]
        done = part.offset
    return order + tokens[done:]


def sent(chunks: list[Any]) -> list[Any]:
    order: list[Any] = []
    for chunk in chunks:
        if isinstance(chunk, types.EncodedTextChunk):
            order += chunk.tokens
        else:
            order.append((chunk.data, chunk.format, chunk.expected_tokens))
    return order


@settings(max_examples=60, deadline=None)
@given(prompts)
def test_text_and_images_keep_their_order_in_every_encoding(chunks: list[Any]) -> None:
    encoded, written = through_protobuf(batch_of(chunks)), through_json(chunks)
    sample = sample_of(*map(as_json, chunks))

    for [datum] in (encoded.data, written.data):
        assert laid_out(datum.tokens.tolist(), datum.images) == sent(chunks)
    assert laid_out(sample.prompt.token_ids(), sample.prompt.images()) == sent(chunks)
    assert encoded.digest() == written.digest()


def test_a_request_with_another_image_is_another_request() -> None:
    def digest(**fields: Any) -> bytes:
        chunk = {"data": PNG, "format": "png", "expected_tokens": 4, **fields}
        return through_protobuf(batch_of([types.ImageChunk(**chunk)])).digest()

    assert digest() == digest()
    assert digest() != digest(data=picture(30, 20, seed=1))


def test_a_stored_sampling_request_still_has_its_images() -> None:
    request = sample_of(as_json(types.ImageChunk(data=PNG, format="png", expected_tokens=4)))

    again = SampleRequest.model_validate_json(request.model_dump_json())

    assert again.prompt.images() == request.prompt.images()


def test_the_stored_form_of_a_text_has_no_fields_of_images() -> None:
    request = sample_of({"tokens": [1, 2]})

    stored = orjson.loads(request.model_dump_json())["prompt"]

    assert stored == {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}


def test_a_sparse_tensor_may_have_a_row_for_every_token_of_an_image() -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(2, dtype="<i4").tobytes()
    datum.model_input.add().image.CopyFrom(pb.ImageChunk(data=PNG, format="png", expected_tokens=3))
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = pb.DTYPE_INT64
    tensor.shape.extend([5, 2])
    tensor.sparse_csr.crow_indices = np.zeros(6, "<i8").tobytes()

    [decoded] = decode_forward_backward(message.SerializeToString()).data

    assert decoded.inputs["target_tokens"].shape == (5, 2)


def image_chunk(**fields: Any) -> dict[str, Any]:
    chunk = {"type": "image", "data": b64encode(PNG).decode(), "format": "png", **fields}
    return {name: value for name, value in chunk.items() if value is not None}


def pointer(location: object, file_format: str = "png") -> dict[str, Any]:
    return {"type": "image_asset_pointer", "location": location, "format": file_format}


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def test_a_data_url_is_the_image_it_contains() -> None:
    [part] = sample_of(pointer(url(PNG))).prompt.images()

    assert (part.data, part.size) == (PNG, (30, 20))


WRONG: dict[str, dict[str, Any]] = {
    "prompt.chunks[1].format: must be 'png' or 'jpeg', got 'gif'": image_chunk(format="gif"),
    "prompt.chunks[1].format: required, and must be a string, got nothing": image_chunk(
        format=None
    ),
    "prompt.chunks[1].data: required, and must be a string, got nothing": image_chunk(data=None),
    "prompt.chunks[1].data: must be base64, got 'a?'": image_chunk(data="a?"),
    "prompt.chunks[1]: format is 'jpeg', but the data is 'png'": image_chunk(format="jpeg"),
    "prompt.chunks[1]: format is 'png', but the data is no known image format": image_chunk(
        data=""
    ),
    "prompt.chunks[1]: the png file is damaged: it ends within its header (20 bytes)": image_chunk(
        data=b64encode(PNG[:20]).decode()
    ),
    "prompt.chunks[1].expected_tokens: must be at least 1, or absent, got 0": image_chunk(
        expected_tokens=0
    ),
    "prompt.chunks[1].override_dimensions: not supported; resize the image": image_chunk(
        override_dimensions={"width": 8, "height": 8}
    ),
    "format is 'png', but location is a URL of 'jpeg'": pointer(url(PNG, "image/jpeg")),
    "prompt.chunks[1].location: required, and must be a string": pointer(None),
    **{
        f"prompt.chunks[1].location: only data: URLs are accepted (data:image/png;base64,...),"
        f" since the service opens no addresses or files, got {address!r}": pointer(address)
        for address in (
            "http://169.254.169.254/latest/meta-data",
            "file:///etc/passwd",
            "/etc/passwd",
            "tinker://run/weights/x",
        )
    },
    "must be data:image/png;base64,... or data:image/jpeg": pointer("data:text/html,x"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_image_is_rejected_by_name(message: str) -> None:
    request = sample_of({"type": "encoded_text", "tokens": [1]}, WRONG[message])

    with pytest.raises(InvalidRequest) as caught:
        request.prompt.images()

    assert message in caught.value.message


@pytest.mark.parametrize("kind", ["dmel", "video"])
def test_other_chunks_are_rejected_by_name(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chunk type '{kind}'.* is not supported"):
        sample_of({"type": kind, "dmel": "aaaa"})


def test_audio_in_a_batch_is_rejected_by_name() -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().dmel.dmel = b"x"

    with pytest.raises(InvalidRequest, match=r"data\[0\].model_input\[0\]: chunk type 'dmel'"):
        decode_forward_backward(message.SerializeToString())


def test_other_dimensions_in_a_batch_are_rejected() -> None:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    image = message.data.add().model_input.add().image
    image.CopyFrom(pb.ImageChunk(data=PNG, format="png"))
    image.override_dimensions.width = 8

    with pytest.raises(InvalidRequest, match=r"model_input\[0\].override_dimensions"):
        decode_forward_backward(message.SerializeToString())


def bomb(width: int, height: int) -> bytes:
    """Return the beginning of a PNG file that states a size."""
    return PNG[:16] + struct.pack(">II", width, height) + PNG[24:]


def test_the_size_of_an_image_is_that_of_its_header() -> None:
    assert header_size(PNG, "png") == (30, 20)
    assert header_size(JPEG, "jpeg") == (40, 24)


def test_a_jpeg_file_with_two_sizes_is_rejected() -> None:
    frame = JPEG.index(b"\xff\xc0")
    length = int.from_bytes(JPEG[frame + 2 : frame + 4]) + 2
    twice = JPEG[:frame] + JPEG[frame : frame + length] + JPEG[frame:]

    with pytest.raises(InvalidRequest, match="2 frame headers, not one"):
        header_size(twice, "jpeg")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([("png", PNG), ("jpeg", JPEG)]), st.data())
def test_a_changed_header_is_read_or_rejected(file: tuple[str, bytes], data: st.DataObject) -> None:
    file_format, content = file
    position = data.draw(st.integers(0, min(len(content), 700) - 1))
    changed = data.draw(st.binary(max_size=8))
    broken = content[:position] + changed + content[position + len(changed) :]
    cut = broken[: data.draw(st.integers(0, len(broken)))]

    with suppress(InvalidRequest):
        assert min(read_image(cut, file_format, None, 0, "here").size) > 0


LIMITS = ImageLimits(
    max_images=2, max_image_bytes=4000, max_image_pixels=1000, max_request_pixels=1500
)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([PNG] * 3, "b: a request may have at most 2 images (limits.max_images)"),
        ([PNG + b"\0" * 4000], "has 5"),
        ([bomb(60000, 60000)], "a: the image has 60000 x 60000 pixels; at most 1000 are accepted"),
        ([bomb(0, 7)], "states a size of 0 x 7 pixels"),
        ([bomb(25, 40), PNG], "b: with it, the images of the request have 1600 pixels; at most"),
    ],
)
def test_images_over_a_limit_are_rejected_by_their_headers(
    files: list[bytes], message: str
) -> None:
    parts = [ImagePart(0, data, "png", None) for data in files]
    named = zip(["a", "b", "b"], parts, strict=False)

    with pytest.raises(InvalidRequest) as caught:
        LIMITS.check_images(named)

    assert message in caught.value.message
