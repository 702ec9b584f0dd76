"""Training batches in JSON: conversion of the bodies of forward_backward and forward.

SDKs before 0.25 and plain HTTP clients send them. Each form becomes the same request as its
protobuf counterpart (`payloads`), bit for bit, under the same checks:

    {"model_id", "seq_id"?, "data", "loss_fn", "loss_fn_config"?, "forward_only"?}
    {"model_id", "seq_id"?, "forward_backward_input": {"data", "loss_fn", "loss_fn_config"?}}
    {"model_id", "seq_id"?, "forward_input": {"data", "loss_fn", "loss_fn_config"?}}

A datum is `{"model_input", "loss_fn_inputs"}`. A model input is `{"chunks": [{"tokens": [...]}]}`,
`{"tokens": [...]}`, `{"input_ids": [...]}` or a list of token ids. Chunks may also be images
(`image_files.read_json_image`). A tensor is
`{"data", "dtype"?, "shape"?, "sparse_crow_indices"?, "sparse_col_indices"?}`, or only its data: a
list, or a list of rows.

Parsed numbers are Python objects, many times as large as their text, so a body's values are
counted before it is parsed.

Shape legend: N tokens of a datum, K targets per position.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tinkercloud_protocol.requests.batch_checks import (
    check_parts,
    check_shape,
    check_spread,
    dense_of_csr,
    shaped,
)
from tinkercloud_protocol.requests.image_files import TEXT, read_json_image
from tinkercloud_protocol.requests.tensors import (
    Array,
    Datum,
    FloatArray,
    ForwardBackwardRequest,
    Int32Array,
    Prompt,
)
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.shown import shown

MAX_VALUES = 1 << 22
"""Maximum number of values of a JSON batch: tokens, elements of tensors and others. Parsing JSON
blocks all other work, and this many values take half a second. The SDK's batches have less than a
third of it."""

_MAX_INT32 = 2**31 - 1
_INPUTS = ("forward_backward_input", "forward_input")
_TOKENS = ("chunks", "tokens", "input_ids")
_FLOATS = ("float32", "float64")
_INTEGERS = ("int32", "int64")
_BOOL = "bool"

Json = Mapping[str, Any]
Int64Array = npt.NDArray[np.int64]


def load_batch(body: bytes) -> Json:
    """Parse the JSON of a batch, without looking at its content.

    Raises:
        InvalidRequest: it is not a JSON object, or has too many parts or values.
    """
    values = body.count(b",") + body.count(b"[")
    if values > MAX_VALUES:
        raise InvalidRequest(
            f"data: the request has about {values} values; at most {MAX_VALUES} are accepted in"
            " JSON. Send less data per request, or send protobuf, as the SDK does"
        )
    # In addition to the parts there are the request, its input, and two objects per datum.
    check_parts(body.count(b"{") // 3)
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"request body: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"request body: must be a JSON object, got {shown(content)}")
    return content


def decode_batch(content: Json) -> ForwardBackwardRequest:
    """Decode a forward_backward or forward request; its `seq_id` is 0 if it has none.

    Raises:
        InvalidRequest: it is invalid, would need much more memory than its size, or contains a
            tensor whose values, dtype and shape disagree.
    """
    given = next((name for name in _INPUTS if content.get(name) is not None), None)
    batch = content if given is None else _object(content[given], given)
    data = [_object(datum, f"data[{i}]") for i, datum in enumerate(_list(batch, "data", "data"))]
    inputs = [
        _object(datum.get("loss_fn_inputs") or {}, f"data[{i}].loss_fn_inputs")
        for i, datum in enumerate(data)
    ]
    config = _object(batch.get("loss_fn_config") or {}, "loss_fn_config")
    check_parts(len(data) + len(config) + sum(map(len, inputs)) + sum(map(_num_chunks, data)))
    check_spread(
        _shape(tensor, "data")
        for tensors in inputs
        for tensor in tensors.values()
        if _is_sparse(tensor)
    )
    return ForwardBackwardRequest(
        model_id=_text(content, "model_id"),
        seq_id=_seq_id(content),
        data=tuple(
            _datum(*parts, f"data[{i}]") for i, parts in enumerate(zip(data, inputs, strict=True))
        ),
        loss_fn=_text(batch, "loss_fn"),
        loss_fn_config={key: _setting(key, value) for key, value in config.items()},
        forward_only=_forward_only(content),
        wants_losses=True,
    )


def _got(value: object) -> str:
    return "nothing" if value is None else shown(value)


def _object(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be an object, got {_got(value)}")
    return value


def _list(content: Json, key: str, where: str) -> list[Any]:
    value = content.get(key)
    if not isinstance(value, list):
        raise InvalidRequest(f"{where}: required, and must be a list, got {_got(value)}")
    return value


def _text(content: Json, key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{key}: required, and must be a string, got {_got(value)}")
    return value


def _seq_id(content: Json) -> int:
    value = content.get("seq_id")
    if value is None:
        return 0
    if type(value) is not int or not 1 <= value <= _MAX_INT32:
        raise InvalidRequest(
            f"seq_id: must be an integer from 1 to {_MAX_INT32}, or absent, got {shown(value)}"
        )
    return value


def _forward_only(content: Json) -> bool:
    value = content.get("forward_only")
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"forward_only: must be true or false, got {shown(value)}")
    return bool(value)


def _setting(key: str, value: object) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidRequest(
            f"loss_fn_config[{key[:80]!r}]: must be a number or text, got {shown(value)}"
        )
    return value if isinstance(value, str) else float(value)


def _num_chunks(datum: Json) -> int:
    tokens = datum.get("model_input")
    chunks = tokens.get("chunks") if isinstance(tokens, dict) else None
    return len(chunks) if isinstance(chunks, list) else 1


def _datum(datum: Json, tensors: Json, where: str) -> Datum:
    prompt = _prompt(datum.get("model_input"), f"{where}.model_input")
    inputs = {
        name: _tensor(name, tensor, prompt.length, f"{where}.loss_fn_inputs[{name[:80]!r}]")
        for name, tensor in tensors.items()
    }
    return Datum(prompt.tokens, inputs, prompt.images)


def _prompt(value: object, where: str) -> Prompt:
    prompt = Prompt()
    if isinstance(value, list):
        prompt.add_tokens(_token_ids(value, where))
        return prompt
    given = [key for key in _TOKENS if key in value] if isinstance(value, dict) else []
    if not isinstance(value, dict) or len(given) != 1:
        raise InvalidRequest(
            f"{where}: must be a list of token ids, or an object with one of chunks, tokens and"
            f" input_ids, got {_got(value)}"
        )
    values = _list(value, given[0], f"{where}.{given[0]}")
    if given != ["chunks"]:
        prompt.add_tokens(_token_ids(values, where))
        return prompt
    for index, chunk in enumerate(values):
        _add_chunk(prompt, chunk, f"{where}.chunks[{index}]")
    return prompt


def _add_chunk(prompt: Prompt, value: object, where: str) -> None:
    chunk = _object(value, where)
    kind = chunk.get("type", TEXT)
    if kind == TEXT:
        prompt.add_tokens(_token_ids(_list(chunk, "tokens", f"{where}.tokens"), where))
    else:
        prompt.add_image(read_json_image(chunk, prompt.num_tokens, where))


def _token_ids(values: list[Any], where: str) -> Int32Array:
    return _check_int32(_integers(values, where), where).astype("<i4")


def _is_sparse(tensor: object) -> bool:
    return isinstance(tensor, dict) and (
        tensor.get("sparse_crow_indices") is not None
        or tensor.get("sparse_col_indices") is not None
    )


def _shape(tensor: Json, where: str) -> tuple[int, ...]:
    """Return the shape that a tensor states; an empty one if it states none."""
    shape = tensor.get("shape")
    if shape is None:
        return ()
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise InvalidRequest(f"{where}: shape must be a list of integers, got {shown(shape)}")
    return tuple(shape)


def _tensor(name: str, value: object, num_tokens: int | None, where: str) -> Array:
    tensor = {"data": value} if isinstance(value, list) else _object(value, where)
    data = _list(tensor, "data", f"{where}.data")
    shape = _shape(tensor, where)
    if any(isinstance(row, list) for row in data):
        data, shape = _flattened(data, shape, where)
    check_shape(shape, where)
    values = _typed(name, data, tensor.get("dtype"), where)
    if _is_sparse(tensor):
        crow, col = (
            _integers(_list(tensor, f"sparse_{kind}", f"{where}.sparse_{kind}"), f"{where}.{kind}")
            for kind in ("crow_indices", "col_indices")
        )
        return dense_of_csr(values, crow, col, shape, num_tokens, where)
    return shaped(values, shape, where)


def _flattened(
    rows: list[Any], shape: tuple[int, ...], where: str
) -> tuple[list[Any], tuple[int, ...]]:
    """Return the values of nested data, and its shape, which must be the one stated."""
    lengths = {len(row) if isinstance(row, list) else None for row in rows}
    if len(lengths) != 1 or None in lengths:
        raise InvalidRequest(f"{where}: all rows must be lists of the same length")
    nested = (len(rows), *(length for length in lengths if length is not None))
    if shape not in {(), nested}:
        raise InvalidRequest(
            f"{where}: shape is {list(shape)}, but the data is nested as {list(nested)}"
        )
    return list(chain.from_iterable(rows)), nested


def _typed(name: str, values: list[Any], dtype: object, where: str) -> Array:
    """Return values in the dtype in which the engines compute: float32 or int64, [N].

    Values without dtype, and bools, become what the engines need: integers for target_tokens,
    floats for everything else.
    """
    if dtype is None or dtype == _BOOL:
        if dtype == _BOOL and not {True, False}.issuperset(_scalars(values, where)):
            raise InvalidRequest(f"{where}: values of dtype 'bool' must be true, false, 1 or 0")
        needs_integers = name == "target_tokens"
        return _integers(values, where) if needs_integers else _floats(values, where)
    if dtype in _FLOATS:
        return _floats(values, where)
    if dtype not in _INTEGERS:
        raise InvalidRequest(
            f"{where}: dtype {shown(dtype)} is not supported; use one of"
            f" {', '.join([*_FLOATS, *_INTEGERS, _BOOL])}"
        )
    array = _integers(values, where)
    return _check_int32(array, where) if dtype == "int32" else array


def _check_int32(array: Int64Array, where: str) -> Int64Array:
    if array.size and not -_MAX_INT32 - 1 <= array.min() <= array.max() <= _MAX_INT32:
        raise InvalidRequest(
            f"{where}: values must fit int32, got {int(array.min())} to {int(array.max())}"
        )
    return array


def _scalars(values: list[Any], where: str) -> list[Any]:
    """Return values, which must be numbers or bools.

    NumPy would also accept text, and give every element the size of the longest one.
    """
    other = set(map(type, values)) - {int, float, bool}
    if other:
        wrong = next(value for value in values if type(value) in other)
        raise InvalidRequest(f"{where}: must contain numbers only, got {shown(wrong)}")
    return values


def _integers(values: list[Any], where: str) -> Int64Array:
    if float in set(map(type, _scalars(values, where))):
        wrong = next(value for value in values if type(value) is float)
        raise InvalidRequest(f"{where}: must contain integers only, got {shown(wrong)}")
    try:
        return np.array(values, dtype="<i8")
    except OverflowError:
        wrong = max(values, key=abs)
        raise InvalidRequest(f"{where}: values must fit int64, got {shown(wrong)}") from None


def _floats(values: list[Any], where: str) -> FloatArray:
    wide = np.array(_scalars(values, where), dtype=np.float64)
    with np.errstate(over="ignore"):
        array = wide.astype("<f4")
    if not np.isfinite(array).all():
        wrong = wide[~np.isfinite(array)][0]
        raise InvalidRequest(f"{where}: values must fit float32, got {wrong:g}")
    return array
