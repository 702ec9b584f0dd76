"""Files of tensors: the library's format, made once and beside other work."""

import subprocess
import sys
import threading
import time
from itertools import pairwise

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
def test_a_file_is_what_the_library_writes_to_the_byte(tensors: dict[str, Tensor]) -> None:
    assert tensor_file.encode(tensors) == save(tensors)


def test_views_come_back_as_tensors_of_their_own() -> None:
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


def test_a_dtype_that_no_checkpoint_has_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'w' is of torch\.complex64; .*torch\.float32"):
        tensor_file.encode({"w": torch.zeros(1, dtype=torch.complex64)})


def test_a_file_is_in_memory_once_while_it_is_made() -> None:
    """The library's own way takes 2; a file in parts that are joined, more too."""
    run = [sys.executable, "-c", PEAK]
    shown = subprocess.run(run, check=True, capture_output=True, text=True, timeout=120)

    assert 1 <= float(shown.stdout) < 1.5


def test_others_go_on_while_a_file_is_made() -> None:
    large = {"w": torch.ones(64 << 20)}
    turns, stop = [time.monotonic()], threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            turns.append(time.monotonic())

    other = threading.Thread(target=take_turns)
    other.start()
    start = time.monotonic()
    tensor_file.encode(large)
    end = time.monotonic()
    time.sleep(0.01)
    stop.set()
    other.join()

    assert max(b - a for a, b in pairwise(turns)) < (end - start) / 2
