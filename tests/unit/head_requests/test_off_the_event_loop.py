"""Large requests are parsed and hashed off the event loop."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pytest

from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.tensors import Datum, ForwardBackwardRequest
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.bare_heads import a_head
from tinkercloud_testing.serving.served_heads import a_served_head
from tinkercloud_worker.head.model import operations
from tinkercloud_worker.head.model.preparation import is_small
from tinkercloud_worker.head.order import requests
from tinkercloud_worker.head.serve import chat_endpoints, running_samples

MODEL = "mine:train:0"
PADDING = "x" * 100_000


def watch(
    threads: dict[str, threading.Thread], patched: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """Record in which thread a function of a module is called."""
    function: Callable[..., Any] = getattr(module, name)

    def watched(*args: Any) -> Any:
        threads[name] = threading.current_thread()
        return function(*args)

    patched.setattr(module, name, watched)


async def test_the_choices_of_many_prompts_are_created_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, threading.Thread] = {}
    asked = {"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 1}

    async with a_served_head(tmp_path) as head:
        await head.sampler("s:sample:0")
        watch(threads, monkeypatch, chat_endpoints, "_choices")
        answer = await head.send(routes.OPENAI_COMPLETIONS, orjson.dumps(asked), "s:sample:0")

    assert len(orjson.loads(answer.body)["choices"]) == 4
    assert threads["_choices"] is not threading.main_thread()


async def test_large_requests_are_hashed_and_parsed_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, threading.Thread] = {}

    async with a_served_head(tmp_path) as head:
        await head.begin(MODEL, ModelSpec(owner="me", lora=LoraConfig(rank=2, seed=1)))
        await head.sampler("s:sample:0")
        watch(threads, monkeypatch, requests, "content_digest")
        watch(threads, monkeypatch, requests, "_json_place")
        watch(threads, monkeypatch, requests, "decode_forward_backward")
        watch(threads, monkeypatch, running_samples, "body_digest")
        place = {"model_id": MODEL, "padding": PADDING}
        step = orjson.dumps(place | {"seq_id": 1, "adam_params": {}})
        wrong = orjson.dumps(place | {"seq_id": 2, "adam_params": {"beta1": 2}})
        sample = orjson.dumps(
            {
                "sampling_session_id": "s:sample:0",
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                "sampling_params": {"max_tokens": 1},
            }
        )
        for path, body, target in (
            (routes.OPTIM_STEP, step, MODEL),
            (routes.OPTIM_STEP, wrong, MODEL),
            (routes.FORWARD_BACKWARD, b"\x0a\x0cmine:train:0\x10\x03", MODEL),
            (routes.ASAMPLE, sample, "s:sample:0"),
        ):
            assert (await head.send(path, body, target)).status == 200

    assert len(threads) == 4
    assert threading.main_thread() not in threads.values()


@pytest.mark.parametrize(
    ("num_sequences", "length", "is_off_loop"),
    [(1, 100, False), (16, 2, False), (17, 2, True), (15, 100, True)],
)
async def test_only_small_batches_of_few_data_are_prepared_and_answered_on_the_event_loop(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_sequences: int,
    length: int,
    is_off_loop: bool,
) -> None:
    threads: dict[str, threading.Thread] = {}

    with a_head(tmp_path.as_uri(), tmp_path, "g1") as head:
        await head.begin()
        watch(threads, monkeypatch, operations, "prepare")
        watch(threads, monkeypatch, operations, "encode_output")
        head.add_all(1, [[5] * length] * num_sequences)
        await head.answer(1)

    assert [thread is not threading.main_thread() for thread in threads.values()] == [
        is_off_loop
    ] * 2


def test_thousands_of_tiny_data_are_no_small_batch_and_are_not_measured() -> None:
    data = (Datum(np.array([5], np.int32), {}),) * 5400
    request = ForwardBackwardRequest("m", 1, data, "cross_entropy", {}, forward_only=False)

    with patch.object(ForwardBackwardRequest, "num_bytes", property(pytest.fail)):
        assert not is_small(request)
