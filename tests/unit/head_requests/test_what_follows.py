"""The engine learns from a head which requests follow the one that it computes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.envelope import peek_training
from tinkercloud_testing.serving.bare_heads import Head, a_head, until
from tinkercloud_testing.small_models.pictures import picture
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.head.order.requests import receive_batch


@asynccontextmanager
async def while_a_batch_waits(head: Head, patched: pytest.MonkeyPatch) -> AsyncIterator[Share]:
    """Send a batch, whose share is given, and let it wait for the engine within the context."""
    thread, shares = head.backend.thread, list[Share]()
    run_batched = thread.run_batched

    async def recorded(batcher: Any, item: Any, share: Share) -> Any:
        shares.append(share)
        return await run_batched(batcher, item, share)

    is_held, may_end = threading.Event(), threading.Event()

    def hold(_yield_point: object) -> None:
        is_held.set()
        may_end.wait()

    await head.begin()
    await head.answer(0)
    holding = asyncio.create_task(thread.run(hold))
    await asyncio.to_thread(is_held.wait)
    patched.setattr(thread, "run_batched", recorded)
    head.add(1)
    await until(lambda: bool(shares))
    try:
        yield shares[0]
    finally:
        may_end.set()
        await holding


def send_batch(head: Head, message: pb.ForwardBackwardRequest) -> None:
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], "<i4").tobytes()
    body = message.SerializeToString()
    head.service.submit(receive_batch(body, peek_training(body)))


def nothing(_head: Head) -> None: ...


def a_step(head: Head) -> None:
    head.apply(2)


def a_batch(head: Head) -> None:
    head.add(2)


def a_broken_batch(head: Head) -> None:
    head.send_broken(2)


def a_broken_step(head: Head) -> None:
    head.send(routes.OPTIM_STEP, 2, adam_params={"beta1": 2})


def a_save(head: Head) -> None:
    head.send(routes.SAVE_WEIGHTS, 2, path="here")


def a_custom_loss(head: Head) -> None:
    send_batch(
        head, pb.ForwardBackwardRequest(model_id=str(head.model), seq_id=2, loss_fn="custom")
    )


def an_image(head: Head) -> None:
    message = pb.ForwardBackwardRequest(model_id=str(head.model), seq_id=2, loss_fn="cross_entropy")
    image = message.data.add().model_input.add().image
    image.data, image.format = picture(8, 8), "png"
    send_batch(head, message)


@pytest.mark.parametrize(
    ("send", "follows"),
    [
        (a_step, True),
        (a_batch, True),
        (nothing, False),
        (a_broken_batch, False),
        (a_broken_step, False),
        (a_save, False),
        (a_custom_loss, False),
        (an_image, False),
    ],
)
async def test_a_batch_is_followed_by_what_computes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, send: Callable[[Head], None], *, follows: bool
) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g1") as head:
        async with while_a_batch_waits(head, monkeypatch) as share:
            send(head)

            assert share.is_followed() == follows


@pytest.mark.parametrize(("length", "follows"), [(10, True), (400, False)])
async def test_a_batch_is_not_followed_at_once_if_a_snapshot_of_the_model_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, *, follows: bool
) -> None:
    config = DurabilityConfig(max_journal_bytes=2000)
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        async with while_a_batch_waits(head, monkeypatch) as share:
            head.add_all(2, [[5] * length])
            await head.confirmed()

            assert share.is_followed() == follows
