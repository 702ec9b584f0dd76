"""The custom losses of one owner hold up no thread that the requests of others need."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_protocol.losses import traced_losses
from tinkercloud_protocol.losses.traced_losses import CustomLoss
from tinkercloud_protocol.wire.envelope import peek_training
from tinkercloud_testing.serving.bare_heads import Head, a_head, until
from tinkercloud_testing.training.uploaded_losses import uploaded
from tinkercloud_worker.head.order.requests import receive_batch


def send_custom(head: Head) -> None:
    message = pb.ForwardBackwardRequest(model_id=str(head.model), seq_id=1, loss_fn="custom")
    message.loss_fn_config_v2["loss_id"].text = "s:loss:0"
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([6, 7], "<i8").tobytes(), pb.DTYPE_INT64
    body = message.SerializeToString()
    head.service.submit(receive_batch(body, peek_training(body)))


async def test_a_loss_that_waits_for_another_one_of_its_owner_occupies_no_thread(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "losses" / "s"
    folder.mkdir(parents=True)
    loss = CustomLoss.model_validate_json(uploaded(lambda logprobs: (logprobs.sum(), {})))
    (folder / "0.json").write_bytes(traced_losses.encode(loss))
    with a_head(tmp_path.as_uri(), tmp_path, "g1") as head:
        await head.begin()
        await head.answer(0)
        losses = head.backend.losses
        owners = losses._owners
        # As if a loss of this owner were being computed.
        owners.running.add(head.spec.owner)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        try:
            send_custom(head)
            await until(lambda: bool(owners.lines))

            assert await asyncio.wait_for(asyncio.to_thread(int), timeout=60) == 0
        finally:
            losses.close()
        assert b"stopping" in await head.answer(1)
