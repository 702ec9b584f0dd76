"""Tensors on the wire: conversion between protobuf bytes and NumPy arrays.

Request tensors are views of the request's bytes if the layout allows it; only reshaped data is
copied. Results are encoded once into their final bytes. The messages are those of the SDK,
compiled from `messages.proto` under other names, so that any SDK can be loaded next to them.

Shape legend: N tokens of a datum, K targets per position.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from google.protobuf.message import DecodeError

from tinkercloud_protocol import messages_pb2 as pb
from tinkercloud_protocol.requests.batch_checks import (
    MAX_PARTS,
    check_parts,
    check_shape,
    check_spread,
    dense_of_csr,
    shaped,
)
from tinkercloud_protocol.requests.image_files import (
    IMAGE,
    TEXT,
    ImagePart,
    read_image,
    refuse_chunk,
    refuse_override,
)
from tinkercloud_protocol.requests.tensors import (
    Array,
    Datum,
    FloatArray,
    ForwardBackwardRequest,
    Int32Array,
    Prompt,
    PromptScores,
    SampledSequence,
    TopLogprobs,
)
from tinkercloud_protocol.wire.body_parts import count_parts
from tinkercloud_protocol.wire.errors import InvalidRequest

COUNTED_BYTES = 5 << 20
"""The parts of longer bodies, which the SDK does not send, are counted before parsing."""

Dtype = np.dtype[np.float32 | np.int64]
_NUMPY_DTYPE: dict[int, Dtype] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
}


def decode_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Decode a protobuf ForwardBackwardRequest.

    Raises:
        InvalidRequest: The body is not such a message, would need much more memory than its size,
            or contains a tensor whose bytes, dtype and shape disagree.
    """
    if len(body) > COUNTED_BYTES:
        check_parts(count_parts(body, MAX_PARTS))
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"forward_backward body is not valid protobuf: {error}") from None
    _check_size(message)
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=tuple(_datum(datum, f"data[{i}]") for i, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        loss_fn_config=_loss_config(message),
        forward_only=message.forward_only,
    )


def _check_size(message: pb.ForwardBackwardRequest) -> None:
    """Check, before decoding, that the decoded size is bounded."""
    data = message.data
    parts = len(data) + len(message.loss_fn_config) + len(message.loss_fn_config_v2)
    # Iterating over millions of them would take seconds.
    if parts <= MAX_PARTS:
        parts += sum(len(datum.model_input) + len(datum.loss_fn_inputs) for datum in data)
    check_parts(parts)
    check_spread(
        tensor.shape
        for datum in data
        for tensor in datum.loss_fn_inputs.values()
        if tensor.HasField("sparse_csr")
    )


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if message.loss_fn_config_v2:
        return {
            key: value.text if value.WhichOneof("value") == "text" else value.number
            for key, value in message.loss_fn_config_v2.items()
        }
    return dict(message.loss_fn_config)


def _datum(message: pb.Datum, where: str) -> Datum:
    prompt = Prompt()
    for index, chunk in enumerate(message.model_input):
        _add_chunk(prompt, chunk, f"{where}.model_input[{index}]")
    num_tokens = prompt.length
    inputs = {
        name: _tensor(tensor, num_tokens, f"{where}.loss_fn_inputs[{name[:80]!r}]")
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(prompt.tokens, inputs, prompt.images)


def _add_chunk(prompt: Prompt, chunk: pb.Chunk, where: str) -> None:
    kind = chunk.WhichOneof("chunk")
    if kind == TEXT:
        prompt.add_tokens(_tokens(chunk.encoded_text.tokens, where))
    elif kind == IMAGE:
        prompt.add_image(_image(chunk.image, prompt.num_tokens, where))
    else:
        raise refuse_chunk(kind, where)


def _tokens(data: bytes, where: str) -> Int32Array:
    if len(data) % 4:
        raise InvalidRequest(
            f"{where}: got {len(data)} bytes of tokens, which is not a multiple of 4 (int32)"
        )
    return np.frombuffer(data, dtype="<i4")


def _image(image: pb.ImageChunk, offset: int, where: str) -> ImagePart:
    if image.HasField("override_dimensions"):
        raise refuse_override(where)
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return read_image(image.data, image.format, expected, offset, where)


def _tensor(message: pb.Tensor, num_tokens: int | None, where: str) -> Array:
    dtype = _NUMPY_DTYPE.get(message.dtype)
    if dtype is None:
        raise InvalidRequest(
            f"{where}: dtype {message.dtype} is not supported; use float32 (1) or int64 (2)"
        )
    shape = tuple(message.shape)
    check_shape(shape, where)
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        values = _array(csr.values, dtype, where)
        crow = _array(csr.crow_indices, np.dtype("<i8"), f"{where}.crow_indices")
        col = _array(csr.col_indices, np.dtype("<i8"), f"{where}.col_indices")
        return dense_of_csr(values, crow, col, shape, num_tokens, where)
    return shaped(_array(message.dense, dtype, where), shape, where)


def _array(data: bytes, dtype: Dtype, where: str) -> Array:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(
            f"{where}: got {len(data)} bytes, which is not a multiple of {dtype.itemsize}"
            f" ({dtype.name})"
        )
    return np.frombuffer(data, dtype=dtype)


def encode_forward_backward_output(
    outputs: Mapping[str, Sequence[FloatArray]], metrics: Mapping[str, float]
) -> bytes:
    """Encode a forward_backward result.

    Args:
        outputs: Per name and datum, float32 of the shape of its target_tokens: [N] or [N, K].
        metrics: Values by keys of the form `name:reduction`.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    data = zip(*outputs.values(), strict=True)
    for trailing_shape, group in groupby(data, key=lambda arrays: arrays[0].shape[1:]):
        columns = list(zip(*group, strict=True))
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(columns[0]))
        for name, arrays in zip(outputs, columns, strict=True):
            record.fields[name].CopyFrom(_batched(arrays, trailing_shape))
    return message.SerializeToString(deterministic=True)


def _batched(arrays: Sequence[FloatArray], trailing_shape: Sequence[int]) -> pb.BatchedTensor:
    """Return the concatenation of arrays that differ only in their first dimension."""
    offsets = np.zeros(len(arrays) + 1, dtype="<i8")
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    return pb.BatchedTensor(
        data=b"".join(_float_bytes(array) for array in arrays),
        offsets=offsets.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=trailing_shape,
    )


def encode_sample_response(sequences: Sequence[SampledSequence], prompt: PromptScores) -> bytes:
    """Encode the result of an asample request."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=prompt.cached_tokens)
    for sequence in sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, dtype="<f4").tobytes(),
        )
        if sequence.top is not None:
            added.topk_sampled_logprobs.CopyFrom(_top_message(sequence.top))
    if prompt.logprobs is not None:
        message.prompt_logprobs = _float_bytes(prompt.logprobs)
    if prompt.top is not None:
        message.topk_prompt_logprobs.CopyFrom(_top_message(prompt.top))
    if prompt.targets is not None:
        message.target_prompt_logprobs.CopyFrom(_dense_message(prompt.targets))
    if prompt.alternatives is not None:
        tokens, logprobs = prompt.alternatives
        message.prompt_alt_tokens.tokens.CopyFrom(_dense_message(tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(_dense_message(logprobs))
    return message.SerializeToString(deterministic=True)


def _top_message(top: TopLogprobs) -> pb.TopkLogprobs:
    length, k = top.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=np.ascontiguousarray(top.token_ids, dtype="<i4").tobytes(),
        logprobs=_float_bytes(top.logprobs),
        k=k,
        length=length,
    )


def _dense_message(array: Array) -> pb.Tensor:
    is_float = array.dtype == np.float32
    return pb.Tensor(
        dense=np.ascontiguousarray(array).tobytes(),
        dtype=pb.DTYPE_FLOAT32 if is_float else pb.DTYPE_INT64,
        shape=array.shape,
    )


def _float_bytes(array: FloatArray) -> bytes:
    return np.ascontiguousarray(array, dtype="<f4").tobytes()
