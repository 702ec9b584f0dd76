"""Queued requests in JSON, with and without a seq_id, survive the suspension of their head."""

from pathlib import Path

import orjson

from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.bare_heads import ADAM, MODEL, Head, a_head
from tinkercloud_worker.head.order import requests

BATCH = {
    "loss_fn": "cross_entropy",
    "data": [{"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8]}}],
}


def send(head: Head, path: str, key: str | None = None, /, **fields: object) -> str:
    """Send a request without a number; return its id."""
    body = orjson.dumps({**fields, "model_id": str(MODEL)})
    is_batch = path in {requests.JSON_FORWARD_BACKWARD, routes.FORWARD}
    receive = requests.receive_json_batch if is_batch else requests.receive_json
    return head.service.submit(receive(path, body), key)


async def test_requests_without_a_number_keep_their_places_and_keys(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        # It waits for the first request, and all others wait behind it.
        head.apply(2)
        sent = [
            send(head, requests.JSON_FORWARD_BACKWARD, "batch", **BATCH),
            send(head, routes.FORWARD, **BATCH),
            send(head, routes.OPTIM_STEP, adam_params=ADAM),
            send(head, routes.SAVE_WEIGHTS),
        ]
        await head.service.suspend()

    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        again = send(after, requests.JSON_FORWARD_BACKWARD, "batch", **BATCH)
        after.add(1)

        assert sent == [f"{MODEL}:{number}" for number in (3, 4, 5, 6)]
        assert again == sent[0]
        assert await after.loss(3) == await after.loss(4)
        assert orjson.loads(await after.answer(5))["metrics"]["step"] == 2
        saved = orjson.loads(await after.answer(6))
        assert saved == {"path": f"tinker://{MODEL}/weights/step-000006"}
