"""Tensor files: the library's format, one copy in memory, and concurrent with other threads."""

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from tinkercloud_worker.checkpoints import tensor_file

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)

PEAK = """
import re
from pathlib import Path

import torch

from tinkercloud_worker.checkpoints import tensor_file


def held(which):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{which}:\\s+(\\d+)", status, re.M)[1]) / 1024


torch.set_num_threads(1)
tensors = {f"layer {i}": torch.ones(1 << 20, 4) for i in range(16)}
tensors |= {"transposed": torch.ones(4, 1 << 20).T}
Path("/proc/self/clear_refs").write_text("5")
before = held("VmRSS")
content = tensor_file.encode(tensors)
print((held("VmHWM") - before) / (len(content) / 2**20))
"""


def a_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


TENSORS = st.dictionaries(
    NAMES, st.builds(a_tensor, st.sampled_from(DTYPES), SHAPES, st.integers(0, 9)), max_size=6
)


@given(tensors=TENSORS)
def test_files_are_bytewise_equal_to_those_of_the_library(tensors: dict[str, Tensor]) -> None:
    assert tensor_file.encode(tensors) == save(tensors)


@given(tensors=TENSORS)
def test_files_of_the_library_are_read_like_the_library_does(tensors: dict[str, Tensor]) -> None:
    content = save(tensors, metadata={"made by": "somebody else"})

    read = tensor_file.decode(content)

    assert read.keys() == tensors.keys()
    for name, tensor in load(content).items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def a_file(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "header would end"),
        (b"12345678", "header would end"),
        (a_file({"a": entry()})[:20], "header would end"),
        (a_file(b"{"), "unexpected end"),
        (a_file([]), "dictionary"),
        (a_file({"a": 1}), "a"),
        (a_file({"a": entry(dtype="F4")}), "'a' has dtype F4; supported are I64, "),
        (a_file({"a": entry(shape=(3,))}), r"'a' has 8 bytes, which do not match \[3\]"),
        (a_file({"a": entry(shape=(-2,))}), "greater than or equal to 0"),
        (a_file({"a": entry(shape=(1 << 62, 1 << 62))}), "which do not match"),
        (
            a_file({"a": entry("F32", (0, (1 << 64) - 1), (0, 0))}, b""),
            "exceeds the limits of a tensor",
        ),
        (a_file({"a": entry(offsets=(8, 0))}), "begins at byte 8, not at 0"),
        (a_file({"a": entry(), "b": entry()}), "'b' begins at byte 0, not at 8"),
        (a_file({"a": entry()}, bytes(9)), "end at byte 8 of 9"),
        (a_file({"a": entry()}, bytes(7)), "has 7 bytes, which do not match"),
        (
            a_file({"a": entry("U8", [1], [0, 1]), "b": entry(offsets=(1, 9))}, bytes(9)),
            "is not aligned to its element size",
        ),
    ],
)
def test_an_invalid_file_is_rejected(content: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        tensor_file.decode(content)


@given(tensors=TENSORS, place=st.integers(0, 300), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_rejected_or_read_without_crashing(
    tensors: dict[str, Tensor], place: int, byte: int, *, cut: bool
) -> None:
    content = bytearray(save(tensors))
    place %= len(content)
    damaged = content[:place] if cut else content[:place] + bytes([byte]) + content[place + 1 :]

    with suppress(ValueError):
        for tensor in tensor_file.decode(bytes(damaged)).values():
            tensor.clone()


def test_views_are_read_back_as_separate_tensors() -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = {
        "all": whole,
        "transposed": whole.T,
        "column": whole[:, 1],
        "every other": whole[::2],
        "expanded": torch.ones(1).expand(3, 2),
        "trained": torch.nn.Parameter(whole[1:3]),
    }

    read = load(tensor_file.encode(tensors))

    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_an_unsupported_dtype_is_rejected_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"'w': unsupported dtype torch\.complex64; .*torch\.float32"
    ):
        tensor_file.encode({"w": torch.zeros(1, dtype=torch.complex64)})


def test_encoding_keeps_one_copy_in_memory() -> None:
    """The library needs 2 copies, and so does joining parts."""
    run = [sys.executable, "-c", PEAK]
    shown = subprocess.run(run, check=True, capture_output=True, text=True, timeout=120)

    assert 1 <= float(shown.stdout) < 1.5


def test_decoding_copies_nothing() -> None:
    content = tensor_file.encode({"w": torch.ones(3), "v": torch.zeros(5)})
    start = np.frombuffer(content, np.uint8).ctypes.data

    read = tensor_file.decode(content)

    assert all(start < each.data_ptr() < start + len(content) for each in read.values())


def test_unaligned_content_is_read() -> None:
    tensors = {"w": torch.ones(3)}
    moved = memoryview(b"." + tensor_file.encode(tensors))[1:]

    read = tensor_file.decode(moved)

    assert torch.equal(read["w"], tensors["w"])
    assert read["w"].data_ptr() % 8 == 0


def test_other_threads_run_while_a_file_is_encoded() -> None:
    large = {"w": torch.ones(64 << 20)}
    turns, stop = [time.monotonic()], threading.Event()

    def count_turns() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            turns.append(time.monotonic())

    other = threading.Thread(target=count_turns)
    other.start()
    start = time.monotonic()
    tensor_file.encode(large)
    end = time.monotonic()
    time.sleep(0.01)
    stop.set()
    other.join()

    assert max(b - a for a, b in pairwise(turns)) < (end - start) / 2
